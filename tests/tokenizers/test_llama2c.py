"""``tokenizer.bin`` gives the ids of SentencePiece, of run.c and of the same vocabulary as a ``tokenizer.json``."""

import itertools
import struct
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.errors import InvalidTokenizer, JaxinferError
from jaxinfer.tokenizers import TextStream, Tokenizer, load_tokenizer
from tests.shared_data import shared_data
from tests.tokenizers import texts
from tests.tokenizers.vocabularies import NoTensors, draw_ids, open_folder, train_sentence_piece

STORIES, FOLDER = "models/stories260K", "models/stories260K-hf"
ALL_TEXTS = texts.TEXTS + texts.SPECIAL_TEXTS

Vocabulary = list[tuple[float, bytes]]


def list_pieces(model: bytes) -> Vocabulary:
    """Return the scores and tokens that llama2.c's exporter takes out of a SentencePiece model."""
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    names = [processor.id_to_piece(token) for token in range(processor.vocab_size())]
    names[1:3] = ["\n<s>\n", "\n</s>\n"]
    return [(processor.get_score(token), name.replace("▁", " ").encode()) for token, name in enumerate(names)]


def encode_vocabulary(vocabulary: Vocabulary) -> bytes:
    entries = [struct.pack("<fi", score, len(token)) + token for score, token in vocabulary]
    return struct.pack("<i", max(len(token) for _, token in vocabulary)) + b"".join(entries)


def open_beside(folder: Path, vocab_size: int) -> Checkpoint:
    path = folder / "model.bin"
    return Checkpoint(str(path), {"vocab_size": vocab_size}, NoTensors(), llama2c_file=path)


def encode_like_run_c(vocabulary: Vocabulary, text: str) -> list[int]:
    """Encode as run.c does: <s>, a space, a token a character or a byte, then the pair of best score until none is."""
    ids = {token: index for index, (_, token) in reversed(list(enumerate(vocabulary)))}
    tokens = [1]
    for character in f" {text}" if text else "":
        byte_ids = [byte + 3 for byte in character.encode()]
        tokens += [ids[character.encode()]] if character.encode() in ids else byte_ids
    while True:
        pairs = [vocabulary[first][1] + vocabulary[second][1] for first, second in itertools.pairwise(tokens)]
        known = [(vocabulary[ids[pair]][0], -place) for place, pair in enumerate(pairs) if pair in ids]
        if not known:
            return tokens
        place = -max(known)[1]
        tokens[place : place + 2] = [ids[pairs[place]]]


@pytest.fixture(scope="module")
def model() -> bytes:
    """A vocabulary as llama2.c trains its own: of characters, bytes and merges."""
    return train_sentence_piece(control_symbols=[])


@pytest.fixture(scope="module")
def vocabulary(model) -> Vocabulary:
    return list_pieces(model)


@pytest.fixture(scope="module")
def tokenizer(vocabulary, tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("llama2c")
    (folder / "tokenizer.bin").write_bytes(encode_vocabulary(vocabulary))
    return load_tokenizer(open_beside(folder, len(vocabulary)))


@settings(derandomize=True, max_examples=100, deadline=None)
@given(texts.words)
def test_ids_are_those_of_sentencepiece_and_run_c(tokenizer, model, vocabulary, text):
    """Except that C ends a string at its NUL and knows no U+2581, which SentencePiece takes for a space."""
    text = text.replace("▁", "_").replace("\0", "0")
    reference = sentencepiece.SentencePieceProcessor()
    reference.LoadFromSerializedProto(model)
    ids = tokenizer.encode(text)
    assert ids == [1, *reference.encode(text)]
    assert ids == encode_like_run_c(vocabulary, text)
    assert tokenizer.decode(ids) == text


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 258) | st.integers(0, 399), max_size=40))
def test_a_stream_of_any_ids_is_their_text(tokenizer, ids):
    stream = TextStream(tokenizer)
    assert "".join(stream.push([token]) for token in ids) + stream.finish() == tokenizer.decode(ids)


def test_the_special_tokens_and_bytes_are_known_by_position(tokenizer):
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (400, 1, (2,))
    assert tokenizer.byte_fallback_ids == frozenset(range(3, 259))
    assert tokenizer.chat_template is None
    assert tokenizer.encode("") == [1]
    assert tokenizer.decode([1, 13, 2]) == "\n"


def test_the_first_exporters_characters_for_bytes_are_read(tokenizer, vocabulary, tmp_path):
    old = [
        (score, chr(token - 3).encode() if 3 <= token < 259 else name) for token, (score, name) in enumerate(vocabulary)
    ]
    (tmp_path / "tokenizer.bin").write_bytes(encode_vocabulary(old))
    found = load_tokenizer(open_beside(tmp_path, 400))
    for text in ALL_TEXTS:
        assert found.encode(text) == tokenizer.encode(text), text
        assert found.decode(found.encode(text)) == tokenizer.decode(tokenizer.encode(text)), text


def test_a_sentencepiece_model_beside_the_checkpoint_gives_the_same_ids(tokenizer, model, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(model)
    found = load_tokenizer(open_beside(tmp_path, 400))
    for text in ALL_TEXTS:
        assert found.encode(text) == tokenizer.encode(text), text


def test_the_file_named_by_its_size_comes_first(vocabulary, tmp_path):
    (tmp_path / "tok400.bin").write_bytes(encode_vocabulary(vocabulary))
    (tmp_path / "tokenizer.bin").write_bytes(b"of another model")
    (tmp_path / "tokenizer.model").write_bytes(b"of yet another")
    assert load_tokenizer(open_beside(tmp_path, 400)).vocab_size == 400
    (tmp_path / "tok400.bin").unlink()
    with pytest.raises(InvalidTokenizer, match=r"tokenizer\.bin: not this model's tokenizer"):
        load_tokenizer(open_beside(tmp_path, 400))


def replace(vocabulary: Vocabulary, token: int, name: bytes | None = None, score: float | None = None) -> bytes:
    changed = list(vocabulary)
    changed[token] = (changed[token][0] if score is None else score, changed[token][1] if name is None else name)
    return encode_vocabulary(changed)


DAMAGES = {
    "too short": (
        lambda known: encode_vocabulary(known[:300]),
        "it has 300 tokens, but the model's vocabulary has 400",
    ),
    "too long": (lambda known: encode_vocabulary([*known, (0.0, b"more")]), "it goes on after 400 tokens"),
    "empty": (lambda known: b"", "it has 0 tokens"),
    "cut": (lambda known: encode_vocabulary(known)[:-1], "token 399 does not fit"),
    "an endless score": (lambda known: replace(known, 300, score=float("inf")), "the score of token 300 is inf"),
    "no score": (lambda known: replace(known, 300, score=float("nan")), "the score of token 300 is nan"),
    "an empty token": (lambda known: replace(known, 300, b""), "token 300 does not fit"),
    "bytes that are no text": (lambda known: replace(known, 300, b"\xff\xfe"), "token 300 is not UTF-8"),
    "another byte": (lambda known: replace(known, 13, b"<0x0B>"), "token 13 is '<0x0B>', not the byte 10"),
    "a token twice": (lambda known: replace(known, 300, known[301][1]), "tokens 300 and 301 are both"),
    "a negative length": (
        lambda known: encode_vocabulary(known)[:8] + struct.pack("<i", -5) + encode_vocabulary(known)[12:],
        "token 0 does not fit",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_kind_of_damage_is_named(vocabulary, tmp_path, damage):
    make, message = DAMAGES[damage]
    (tmp_path / "tokenizer.bin").write_bytes(make(vocabulary))
    with pytest.raises(
        InvalidTokenizer, match=rf"tokenizer\.bin: not this model's tokenizer, or damaged: {message}"
    ) as error:
        load_tokenizer(open_beside(tmp_path, 400))
    assert "\n" not in str(error.value)


def test_a_vocabulary_without_room_for_bytes_is_refused(vocabulary, tmp_path):
    (tmp_path / "tokenizer.bin").write_bytes(encode_vocabulary(vocabulary[:40]))
    with pytest.raises(InvalidTokenizer, match="a vocabulary of 40 has no room for <unk>, <s>, </s> and 256 bytes"):
        load_tokenizer(open_beside(tmp_path, 40))


def test_a_sentencepiece_model_of_another_size_is_refused(model, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(model)
    with pytest.raises(InvalidTokenizer, match="it has 400 tokens, but the model's vocabulary has 512"):
        load_tokenizer(open_beside(tmp_path, 512))


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(InvalidTokenizer, match=r"put tok400\.bin, tokenizer\.bin or tokenizer\.model beside it"):
        load_tokenizer(open_beside(tmp_path, 400))


@pytest.mark.slow
@settings(derandomize=True, max_examples=100, deadline=None)
@given(data=st.data())
def test_flipped_and_cut_vocabularies_are_read_or_refused(vocabulary, tmp_path_factory, data):
    damaged = bytearray(encode_vocabulary(vocabulary))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path_factory.getbasetemp() / "tok400.bin"
    path.write_bytes(damaged[: data.draw(st.sampled_from([len(damaged), len(damaged) // 2, 3]))])
    try:
        found = load_tokenizer(open_beside(path.parent, 400))
        shown = f"{path}: {len(found.decode(found.encode('hello 漢 😀')))} characters"
    except JaxinferError as error:
        shown = str(error)
    assert "\n" not in shown
    assert str(path) in shown


@pytest.fixture(scope="module")
def stories() -> tuple[Tokenizer, Tokenizer]:
    """Return the tokenizer beside the ``.bin`` and that of the same model's folder."""
    return load_tokenizer(open_beside(shared_data(STORIES), 512)), load_tokenizer(open_folder(shared_data(FOLDER)))


def test_ids_and_text_of_stories260k_are_those_of_its_folder(stories):
    ours, theirs = stories
    sample = shared_data("text/wikitext2_valid.txt").read_text(encoding="utf-8")[:20_000]
    for text in [*ALL_TEXTS, sample]:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip), text


@settings(derandomize=True, max_examples=200, deadline=None)
@given(texts.words)
def test_ids_of_any_text_are_those_of_the_folder(stories, text):
    ours, theirs = stories
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)


def test_text_of_any_ids_is_that_of_the_folder(stories):
    ours, theirs = stories
    for seed in range(50):
        ids = draw_ids(seed, 512, 30)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
