"""The SentencePiece vocabulary inside a GGUF gives the ids and the text of SentencePiece itself."""

import contextlib

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.errors import InvalidTokenizer, JaxinferError
from jaxinfer.tokenizers import TextStream, Tokenizer, load_tokenizer
from tests.shared_data import shared_data
from tests.tokenizers import texts
from tests.tokenizers.vocabularies import open_gguf, to_gguf_sentence_piece, train_sentence_piece

GEMMA_SYMBOLS = ["<start_of_turn>", "<end_of_turn>", "<b>", "\n", "\n\n", "\n\n\n", "▁▁", "▁▁▁", "▁▁▁▁", "\t"]
GEMMA_TEXTS = [
    "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    "\n\n\n\n\n a  b   c    d     e\t\t<b>x</b>",
    " <b> ▁▁ ▁  <b>",
]


def load_processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    return processor


def check(tokenizer: Tokenizer, reference: sentencepiece.SentencePieceProcessor, text: str) -> None:
    """Compare the ids, the text of the ids and the text of their stream."""
    ids = reference.encode(text)
    assert tokenizer.encode(text, add_special_tokens=False) == ids, text
    assert tokenizer.decode(ids) == reference.decode(ids), text
    stream = TextStream(tokenizer)
    assert stream.push(ids) + stream.finish() == reference.decode(ids), text


def holds_special(text: str) -> bool:
    return any(name in text for name in ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<bos>", "<eos>"))


@pytest.fixture(scope="module")
def llama() -> bytes:
    return train_sentence_piece()


@pytest.fixture(scope="module")
def gemma() -> bytes:
    return train_sentence_piece(
        add_dummy_prefix=False,
        user_defined_symbols=GEMMA_SYMBOLS,
        control_symbols=[],
        bos_piece="<bos>",
        eos_piece="<eos>",
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
    )


@pytest.fixture(scope="module")
def tokenizer(llama) -> Tokenizer:
    return load_tokenizer(open_gguf(to_gguf_sentence_piece(llama)))


@pytest.fixture(scope="module")
def gemma_tokenizer(gemma) -> Tokenizer:
    more = {"add_space_prefix": False}
    return load_tokenizer(open_gguf(to_gguf_sentence_piece(gemma, GEMMA_SYMBOLS, **more)))


@pytest.mark.parametrize("text", texts.TEXTS + texts.SPECIAL_TEXTS)
def test_every_class_of_text_has_the_ids_and_the_text_of_sentencepiece(tokenizer, llama, text):
    if not holds_special(text):
        check(tokenizer, load_processor(llama), text)
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id == 1
    written = tokenizer.decode(ids, skip_special_tokens=False)
    assert written.replace(" ", "") == f"<s>{text}".replace(" ", "").replace("▁", "")


@settings(derandomize=True, max_examples=80, deadline=None)
@given(texts.words)
def test_any_text_has_the_ids_and_the_text_of_sentencepiece(tokenizer, llama, text):
    check(tokenizer, load_processor(llama), text)


def test_special_tokens_are_cut_out_and_the_text_between_is_sentencepieces(tokenizer, llama):
    reference = load_processor(llama)
    user, end = reference.piece_to_id("[INST]"), reference.piece_to_id("[/INST]")
    between = [user, *reference.encode(" 漢 é"), end, *reference.encode("😀"), 2]
    ids = tokenizer.encode("  a 1[INST] 漢 é[/INST]😀</s>")
    assert ids == [1, *reference.encode("  a 1"), *between]
    assert tokenizer.decode(ids) == "  a 1  漢 é 😀"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>   a 1[INST]  漢 é[/INST] 😀</s>"
    # Llama 2's chat, which its own code encodes turn by turn.
    assert tokenizer.encode("<s>a 1</s>", add_special_tokens=False) == [1, *reference.encode("a 1"), 2]


@pytest.mark.parametrize("text", [*texts.TEXTS, *GEMMA_TEXTS])
def test_gemmas_settings_have_the_ids_and_the_text_of_sentencepiece(gemma_tokenizer, gemma, text):
    """No leading space, and user-defined tokens of several spaces, which the file writes as they are in the text."""
    if holds_special(text):
        text = text.replace("<unk>", "")
    check(gemma_tokenizer, load_processor(gemma), text)
    assert gemma_tokenizer.encode(text)[:1] == [2]


@settings(derandomize=True, max_examples=80, deadline=None)
@given(st.text(st.sampled_from(" \n\t▁<b>a1é漢😀"), max_size=30) | texts.words)
def test_any_text_in_gemmas_settings_has_the_ids_of_sentencepiece(gemma_tokenizer, gemma, text):
    check(gemma_tokenizer, load_processor(gemma), text)
    if "▁" not in text:
        assert gemma_tokenizer.decode(gemma_tokenizer.encode(text)) == text


def test_gemmas_user_defined_tokens_are_single(gemma_tokenizer, gemma):
    reference = load_processor(gemma)
    expected = [reference.piece_to_id(name) for name in ("<start_of_turn>", "\n\n", "▁▁▁▁", "<b>")]
    assert gemma_tokenizer.encode("<start_of_turn>\n\n    <b>", add_special_tokens=False) == expected
    assert (gemma_tokenizer.bos_token_id, gemma_tokenizer.eos_token_ids) == (2, (1,))


@pytest.mark.slow
@pytest.mark.parity
def test_a_real_vocabulary_has_the_ids_and_the_text_of_sentencepiece():
    model = shared_data("tokenizers/mistral_v3_tokenizer.model").read_bytes()
    reference = load_processor(model)
    tokenizer = load_tokenizer(open_gguf(to_gguf_sentence_piece(model)))
    assert tokenizer.vocab_size == reference.vocab_size() == 32768
    sample = shared_data("text/wikitext2_valid.txt").read_text(encoding="utf-8")[:20_000].replace("<unk>", "")
    for text in [*texts.TEXTS, *texts.SPECIAL_TEXTS, sample]:
        if not holds_special(text):
            check(tokenizer, reference, text)
    assert tokenizer.encode("[INST] Hi [/INST] x")[:2] == [1, reference.piece_to_id("[INST]")]


def test_the_file_says_what_stands_before_and_after_a_text(llama):
    def encode_nothing(**more) -> list[int]:
        return load_tokenizer(open_gguf(to_gguf_sentence_piece(llama, **more))).encode("")

    assert encode_nothing() == [1]
    assert encode_nothing(add_bos_token=False) == []
    assert encode_nothing(add_eos_token=True) == [1, 2]
    assert encode_nothing(bos_token_id=None, eos_token_id=None, add_eos_token=True) == [1, 2]
    assert encode_nothing(bos_token_id=3, eos_token_id=4, add_eos_token=True) == [3, 4]


def test_ends_of_a_turn_and_the_chat_template_come_from_the_file(llama):
    metadata = to_gguf_sentence_piece(llama, eot_token_id=4)
    metadata["tokenizer.chat_template"] = "{{ bos_token }}[INST] {{ messages[0].content }} [/INST]"
    tokenizer = load_tokenizer(open_gguf(metadata))
    assert tokenizer.eos_token_ids == (2, 4)
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render([{"role": "user", "content": "x"}]) == "<s>[INST] x [/INST]"


def test_a_leading_space_is_by_architecture_where_the_file_is_silent(llama):
    metadata = to_gguf_sentence_piece(llama)
    reference = load_processor(llama)
    for architecture, piece in (("llama", "▁a"), ("phi3", "▁a"), ("gemma", "a"), ("gemma2", "a"), ("gemma3", "a")):
        tokenizer = load_tokenizer(open_gguf(metadata | {"general.architecture": architecture}))
        assert tokenizer.encode("a") == [1, reference.piece_to_id(piece)], architecture


def test_phi_3s_control_tokens_take_the_spaces_after_them(llama):
    metadata = to_gguf_sentence_piece(llama)
    phi = load_tokenizer(open_gguf(metadata | {"general.architecture": "phi3"}))
    plain = load_tokenizer(open_gguf(metadata | {"general.architecture": "llama"}))
    assert phi.encode("[INST] \n a[/INST]\nb") == plain.encode("[INST]a[/INST]b")
    assert phi.encode("<s> a") == plain.encode("<s> a")


def test_padding_and_empty_tokens_are_never_used(llama):
    reference = load_processor(llama)
    metadata = to_gguf_sentence_piece(llama)
    for key, more in (("tokens", ["", "[PAD]", "aa"]), ("scores", [0.0] * 3), ("token_type", [1, 5, 0])):
        metadata[f"tokenizer.ggml.{key}"] += more
    tokenizer = load_tokenizer(open_gguf(metadata))
    assert tokenizer.vocab_size == reference.vocab_size() + 3
    assert tokenizer.encode("[PAD]", add_special_tokens=False) == reference.encode("[PAD]")
    assert reference.vocab_size() + 2 in tokenizer.encode("aaaa")


def test_a_vocabulary_without_an_unknown_token_takes_the_formats_first(llama):
    metadata = to_gguf_sentence_piece(llama)
    metadata["tokenizer.ggml.token_type"][0] = 1
    tokenizer = load_tokenizer(open_gguf(metadata))
    assert tokenizer.encode("hello", add_special_tokens=False) == load_processor(llama).encode("hello")


def break_vocabulary(metadata, key, place, value):
    column = list(metadata[f"tokenizer.ggml.{key}"])
    column[place] = value
    return metadata | {f"tokenizer.ggml.{key}": column}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": None}, r"tokenizer\.ggml\.scores must have one finite number a token"),
        ({"scores": [0.0]}, r"tokenizer\.ggml\.scores must have one"),
        ({"token_type": [1]}, r"token_type must have one entry a token"),
        ({"tokens": None}, r"tokens must be a list of strings"),
        ({"bos_token_id": 10**6}, r"bos_token_id is 1000000, outside"),
        ({"add_space_prefix": 1}, r"add_space_prefix must be true or false"),
        ({"remove_extra_whitespaces": True}, r"remove_extra_whitespaces has no meaning"),
        ({"precompiled_charsmap": [1]}, r"precompiled_charsmap has no meaning"),
        (("tokens", 300, "a\0"), r"vocabulary inside toy\.gguf is not a SentencePiece model"),
        (("tokens", 300, "<s>"), r"names '<s>' twice, as 1 and 300"),
        (("tokens", 300, "x" * 10**5), r"is not a SentencePiece model"),
        (("tokens", 100, "byte"), r"is not a SentencePiece model"),
        (("token_type", 100, 1), r"marks 255 bytes, not all 256 or none"),
        (("scores", 7, float("nan")), r"scores must have one finite number"),
        (("scores", 7, 10**60), r"scores must have one finite number"),
        (("scores", 7, "x"), r"scores must have one finite number"),
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_damaged_vocabulary_is_refused_by_name(llama, change, message):
    metadata = to_gguf_sentence_piece(llama)
    if isinstance(change, tuple):
        metadata = break_vocabulary(metadata, *change)
    else:
        metadata |= {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    with pytest.raises(InvalidTokenizer, match=message) as error:
        load_tokenizer(open_gguf(metadata))
    assert "\n" not in str(error.value)
    assert "toy.gguf" in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.slow
@settings(derandomize=True, max_examples=120, deadline=None)
@given(data=st.data())
def test_a_vocabulary_changed_anywhere_is_read_or_refused(llama, data):
    metadata = to_gguf_sentence_piece(llama)
    odd = st.one_of(st.integers(-1, 7), st.text(max_size=4), st.floats(), st.booleans(), st.just([1]), st.none())
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from(["tokens", "scores", "token_type"]))
        metadata = break_vocabulary(metadata, key, data.draw(st.integers(0, 399)), data.draw(odd))
    name = data.draw(st.sampled_from(["bos_token_id", "eot_token_id", "unknown_token_id", "add_space_prefix", "model"]))
    metadata |= data.draw(st.just({}) | st.fixed_dictionaries({f"tokenizer.ggml.{name}": odd}))
    with contextlib.suppress(JaxinferError):
        tokenizer = load_tokenizer(open_gguf(metadata))
        assert tokenizer.vocab_size == 400
        tokenizer.decode(tokenizer.encode("a 漢  <s> é[INST]\n"))
