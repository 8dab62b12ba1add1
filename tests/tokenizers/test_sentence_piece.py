"""SentencePiece models with LlamaTokenizer's treatment of special tokens and spaces."""

import json

import pytest
import sentencepiece
from hypothesis import given, settings

from jaxinfer.errors import InvalidTokenizer
from jaxinfer.tokenizers import Tokenizer, load_tokenizer
from tests.tokenizers import texts
from tests.tokenizers.vocabularies import open_folder, train_sentence_piece

ADDED = {"added_tokens_decoder": {"400": {"content": "<tool>", "special": False, "normalized": False}}}


@pytest.fixture(scope="module")
def model() -> bytes:
    return train_sentence_piece()


@pytest.fixture(scope="module")
def reference(model) -> sentencepiece.SentencePieceProcessor:
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    return processor


@pytest.fixture
def load(model, tmp_path):
    def load_with(content: bytes = model, **settings) -> Tokenizer:
        (tmp_path / "tokenizer.model").write_bytes(content)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        return load_tokenizer(open_folder(tmp_path))

    return load_with


@pytest.fixture(scope="module")
def tokenizer(model, tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("sentence_piece")
    (folder / "tokenizer.model").write_bytes(model)
    return load_tokenizer(open_folder(folder))


@settings(derandomize=True, max_examples=60, deadline=None)
@given(texts.words)
def test_plain_text_gets_the_ids_of_sentencepiece_and_comes_back(tokenizer, reference, text):
    text = text.replace("▁", "_").lstrip(" ")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == reference.encode(text)
    assert tokenizer.decode(ids) == text


def test_ids_that_begin_and_end_come_from_the_model(tokenizer):
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert tokenizer.encode("") == [1]


def test_beginning_and_end_are_added_as_the_folder_says(load):
    assert load(add_bos_token=False).encode("") == []
    assert load(add_bos_token=True, add_eos_token=True).encode("") == [1, 2]


def test_only_the_first_segment_begins_a_word_unless_legacy(load, reference):
    a = reference.piece_to_id("▁a")
    bare = reference.piece_to_id("a")
    assert load().encode("a[INST]a", add_special_tokens=False) == [a, 3, bare]
    assert load().encode("[INST]a", add_special_tokens=False) == [3, bare]
    assert load(legacy=True).encode("a[INST]a", add_special_tokens=False) == [a, 3, a]
    assert load(add_prefix_space=False).encode("a[INST]a", add_special_tokens=False) == [bare, 3, bare]
    assert load().encode(" a[INST] a", add_special_tokens=False) == [a, 3, a]


def test_added_tokens_of_the_folder_are_parsed_whole(load, reference):
    assert reference.vocab_size() == 400
    tokenizer = load(**ADDED)
    assert tokenizer.vocab_size == 401
    ids = tokenizer.encode("a<tool>b", add_special_tokens=False)
    assert 400 in ids
    assert tokenizer.decode(ids) == "a<tool>b"
    assert tokenizer.decode(tokenizer.encode("<s>a</s>")) == "a"
    assert tokenizer.decode(tokenizer.encode("x</s>"), skip_special_tokens=False) == "<s> x</s>"


def test_added_tokens_take_the_spaces_that_they_strip(load):
    shape = {"content": "<tool>", "lstrip": True, "rstrip": True}
    tokenizer = load(added_tokens_decoder={"400": shape})
    assert tokenizer.decode(tokenizer.encode("a  <tool>  b")) == "a<tool>b"


def test_a_model_that_normalizes_spaces_keeps_its_own_rule(load):
    content = train_sentence_piece(remove_extra_whitespaces=True, normalization_rule_name="nmt_nfkc")
    reference = sentencepiece.SentencePieceProcessor()
    reference.LoadFromSerializedProto(content)
    tokenizer = load(content)
    for text in ["  a  b ", "ﬁne\tfox", "hello"]:
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text)


@pytest.mark.parametrize("content", [b"", b"\x00" * 64, b"not a model"])
def test_a_file_that_is_no_model_is_refused(load, content):
    with pytest.raises(InvalidTokenizer, match=r"tokenizer\.model is not a SentencePiece model: fetch it again"):
        load(content)


def test_a_piece_that_is_not_utf8_is_refused(load, model):
    with pytest.raises(InvalidTokenizer, match="is not a SentencePiece model"):
        load(model.replace("▁hello".encode(), b"\xe2\x96\xffhello"))


def test_a_truncated_model_is_refused(load, model):
    with pytest.raises(InvalidTokenizer, match="is not a SentencePiece model"):
        load(model[: len(model) // 2])


@pytest.mark.parity
@pytest.mark.parametrize("options", [{}, {"legacy": True}, ADDED, {"legacy": True} | ADDED], ids=str)
def test_ids_and_text_are_those_of_llama_tokenizer(load, tmp_path, options):
    transformers = pytest.importorskip("transformers")
    ours = load(add_bos_token=True, **options)
    theirs = transformers.LlamaTokenizer.from_pretrained(tmp_path)
    for text in [*texts.TEXTS, *texts.SPECIAL_TEXTS, "a<tool>b <tool>", "<tool> x"]:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip), text
