"""A trained model is written with the tokenizer of its base, whatever file that was in, whole or not at all."""

from dataclasses import replace

import pytest

import jaxinfer
from jaxinfer.errors import UnsupportedModel, WriteFailed
from jaxinfer.tokenizers import load_tokenizer
from tests.tokenizers.vocabularies import open_gguf, to_gguf_metadata, to_gguf_sentence_piece, train_byte_level
from tests.tokenizers.vocabularies import train_sentence_piece as train_pieces
from tests.toys import TINY_LLAMA, random_params
from train.model.folder import check_writable, write_model

TEXTS = ("Hello, world! 3.14159", "naïve 東京 🙂", "a <|im_end|> b", "def f(x):\n    return  x")
TEMPLATE = "{% for message in messages %}{{ bos_token }}{{ message.content }}{% endfor %}"


@pytest.fixture(
    scope="module", params=[{"eos_token_id": 2}, {"bos_token_id": 1, "eos_token_id": 2, "add_bos_token": True}]
)
def base(request):
    """A GGUF file's vocabulary, and a model of as many tokens."""
    pipeline = train_byte_level()
    checkpoint = open_gguf({**to_gguf_metadata(pipeline, **request.param), "tokenizer.chat_template": TEMPLATE})
    tokenizer = load_tokenizer(checkpoint)
    config = replace(TINY_LLAMA, vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids)
    return checkpoint, tokenizer, config, random_params(config)


def test_the_vocabulary_of_a_gguf_file_becomes_a_folders(base, tmp_path):
    checkpoint, tokenizer, config, params = base
    check_writable(config, checkpoint, tokenizer)
    write_model(tmp_path / "model", config, params, "bfloat16", checkpoint, tokenizer, "# A card\n")
    lm = jaxinfer.load(tmp_path / "model")
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert lm.tokenizer.encode(text) == ids
        assert lm.tokenizer.decode(ids) == tokenizer.decode(ids)
    assert tokenizer.eos_token_ids
    assert set(lm.eos_token_ids) == set(tokenizer.eos_token_ids)
    assert lm.tokenizer.bos_token_id == tokenizer.bos_token_id
    talk = [{"role": "user", "content": "hi"}]
    assert lm.tokenizer.chat_template.render(talk) == tokenizer.chat_template.render(talk)
    assert (tmp_path / "model" / "README.md").read_text() == "# A card\n"


def test_a_full_disk_leaves_the_model_that_was_there(base, tmp_path, monkeypatch):
    checkpoint, tokenizer, config, params = base
    write_model(tmp_path / "model", config, params, "float32", checkpoint, tokenizer, "first")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("train.model.folder._write_tokenizer", full)
    with pytest.raises(WriteFailed, match="No space left on device; free some space"):
        write_model(tmp_path / "model", config, params, "float32", checkpoint, tokenizer, "second")
    assert (tmp_path / "model" / "README.md").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_cannot_be_written_is_refused_before_a_run(base):
    checkpoint, tokenizer, config, _ = base
    with pytest.raises(UnsupportedModel, match="family 'other' cannot be written"):
        check_writable(replace(config, family="other"), checkpoint, tokenizer)
    pieces = open_gguf(to_gguf_sentence_piece(train_pieces()))
    with pytest.raises(UnsupportedModel, match="SentencePiece vocabulary cannot be written"):
        check_writable(config, pieces, load_tokenizer(pieces))
