"""Folders with vocab.json and merges.txt alone give the ids and texts of transformers' tokenizers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from tokenizers import pre_tokenizers

from jaxinfer.errors import InvalidTokenizer
from jaxinfer.tokenizers import Tokenizer, load_tokenizer
from tests.shared_data import shared_data
from tests.tokenizers import texts
from tests.tokenizers.vocabularies import draw_ids, open_folder, train_byte_level

MARKED = ["</s>", "<pad>", "a</s>b", " <pad> x</s>", "<|endoftext|>a"]
OPT_TOKEN = {"content": "</s>", "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
OPT = {
    "add_bos_token": True, "add_prefix_space": False, "bos_token": {"__type": "AddedToken", **OPT_TOKEN},
    "eos_token": {"__type": "AddedToken", **OPT_TOKEN}, "unk_token": {"__type": "AddedToken", **OPT_TOKEN},
    "pad_token": "<pad>", "errors": "replace", "tokenizer_class": "GPT2Tokenizer",
}  # fmt: skip
QWEN2 = {
    "tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": False, "bos_token": None, "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>", "additional_special_tokens": ["<|im_start|>"],
}  # fmt: skip


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


@pytest.fixture(scope="module")
def pipeline() -> tokenizers.Tokenizer:
    return train_byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))


@pytest.fixture(scope="module")
def tokenizer(pipeline, tmp_path_factory) -> Tokenizer:
    """The vocabulary as Windows would write its files, without settings."""
    folder = tmp_path_factory.mktemp("plain")
    model = json.loads(pipeline.to_str())["model"]
    write(folder, "vocab.json", model["vocab"])
    write(folder, "merges.txt", "\r\n".join(" ".join(one) for one in model["merges"]))
    return load_tokenizer(open_folder(folder, {"model_type": "opt"}))


@pytest.fixture
def folder(pipeline, tmp_path) -> Path:
    """A small vocabulary trained by the tests, with OPT's special tokens in it."""
    model = json.loads(pipeline.to_str())["model"]
    ids = {**model["vocab"], "</s>": len(model["vocab"]), "<pad>": len(model["vocab"]) + 1}
    write(tmp_path, "vocab.json", ids)
    merges = [" ".join(one) for one in model["merges"]]
    write(tmp_path, "merges.txt", "\n".join(["#version: 0.2", *merges, ""]))
    write(tmp_path, "config.json", {"model_type": "gpt2"})
    return tmp_path


def check_equal(folder: Path, kind: str = "GPT2Tokenizer") -> None:
    """Compare ids and decoded texts, whole and of broken runs of ids."""
    transformers = pytest.importorskip("transformers")
    reference = getattr(transformers, kind).from_pretrained(str(folder))
    tokenizer = load_tokenizer(open_folder(folder, {"model_type": "gpt2"}))
    for text in (*texts.TEXTS, *texts.SPECIAL_TEXTS, *MARKED):
        for adds in (True, False):
            ids = reference.encode(text, add_special_tokens=adds)
            assert tokenizer.encode(text, add_special_tokens=adds) == ids, text
            for skips in (True, False):
                expected = reference.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
                assert tokenizer.decode(ids, skip_special_tokens=skips) == expected
    for seed in range(5):
        ids = draw_ids(seed, len(reference), 40)
        assert tokenizer.decode(ids, skip_special_tokens=False) == reference.decode(
            ids, clean_up_tokenization_spaces=False
        )


@pytest.mark.parity
@pytest.mark.parametrize(
    "config", [{}, OPT, {**OPT, "add_prefix_space": True, "add_eos_token": True}, {"add_prefix_space": True}]
)
def test_a_trained_vocabulary_is_read_as_transformers_reads_it(folder, config):
    write(folder, "tokenizer_config.json", config)
    check_equal(folder)


@pytest.mark.parity
def test_the_word_split_is_that_of_the_class(folder):
    write(folder, "tokenizer_config.json", QWEN2)
    check_equal(folder, "Qwen2Tokenizer")
    tokenizer = load_tokenizer(open_folder(folder))
    assert tokenizer.encode("12345") == [tokenizer.encode(digit)[0] for digit in "12345"]
    assert tokenizer.bos_token_id is None


@pytest.mark.parity
def test_added_tokens_and_the_map_of_special_tokens_are_read(folder):
    size = max(json.loads((folder / "vocab.json").read_text()).values()) + 1
    write(folder, "added_tokens.json", {"<|user|>": size + 1, "\t\t\t": size})
    write(folder, "special_tokens_map.json", {"eos_token": OPT_TOKEN, "additional_special_tokens": ["<|user|>"]})
    check_equal(folder)
    tokenizer = load_tokenizer(open_folder(folder, {"model_type": "gpt2"}))
    assert tokenizer.encode("\t\t\t<|user|>") == [size, size + 1]
    assert tokenizer.decode([size, size + 1]) == "\t\t\t"
    assert tokenizer.vocab_size == size + 2


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize("config", [{"model_max_length": 1024}, {"add_bos_token": True}])
def test_the_vocabulary_of_gpt2_is_read_as_transformers_reads_it(tmp_path, config):
    source = shared_data("tokenizers/gpt2")
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(source / name, tmp_path / name)
    write(tmp_path, "config.json", {"model_type": "gpt2"})
    write(tmp_path, "tokenizer_config.json", config)
    check_equal(tmp_path)
    tokenizer = load_tokenizer(open_folder(tmp_path, {"model_type": "gpt2", "bos_token_id": 50256}))
    assert tokenizer.encode("Hello world")[-2:] == [15496, 995]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (50256, (50256,), 50257)


def test_opt_begins_a_text_with_its_end_token(folder):
    write(folder, "tokenizer_config.json", OPT)
    tokenizer = load_tokenizer(open_folder(folder, {"model_type": "opt", "bos_token_id": 2, "eos_token_id": 420}))
    end = json.loads((folder / "vocab.json").read_text())["</s>"]
    assert tokenizer.encode("")[:1] == tokenizer.encode("hello")[:1] == [end]
    assert tokenizer.encode("hello", add_special_tokens=False)[0] != end
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (end, tuple(dict.fromkeys((420, end))))
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


@settings(derandomize=True, max_examples=40, deadline=None)
@given(text=texts.words)
def test_any_text_comes_back_from_its_ids(tokenizer, pipeline, text):
    assert tokenizer.encode(text) == pipeline.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_tokenizer_json_comes_first(folder, pipeline):
    write(folder, "tokenizer.json", pipeline.to_str())
    write(folder, "vocab.json", "{")
    assert load_tokenizer(open_folder(folder)).vocab_size == pipeline.get_vocab_size()


@pytest.mark.parametrize("missing", ["vocab.json", "merges.txt"])
def test_one_file_without_the_other_is_refused(folder, missing):
    (folder / missing).unlink()
    with pytest.raises(InvalidTokenizer, match=rf"has \S+ but no {missing}: fetch both"):
        load_tokenizer(open_folder(folder, {"model_type": "gpt2"}))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.json", "{", r"vocab\.json is not valid JSON"),
        ("vocab.json", "[" * 10**5, r"vocab\.json is not valid JSON"),
        ("vocab.json", "{}", "must hold an object of tokens and their ids"),
        ("vocab.json", '[["a", 1]]', "must hold an object of tokens and their ids"),
        ("vocab.json", '"a"', "must hold an object of tokens and their ids"),
        ("vocab.json", '{"a": "1"}', "must hold an object of tokens and their ids"),
        ("vocab.json", '{"a": true}', "must hold an object of tokens and their ids"),
        ("vocab.json", '{"a": -1}', "must hold an object of tokens and their ids"),
        ("vocab.json", '{"a": 99999999999}', "must hold an object of tokens and their ids"),
        ("vocab.json", '{"a": {"b": 1}}', "must hold an object of tokens and their ids"),
        ("vocab.json", '{"a": 1, "a": 2}', "names a token or an id twice"),
        ("vocab.json", '{"a": 1, "b": 1}', "names a token or an id twice"),
        ("merges.txt", "#version: 0.2\nh e\nnothere either", r"the merges do not fit the tokens: .*nothere"),
        ("merges.txt", "h e\nhello", r"merges\.txt: line 2 is 'hello', not two tokens"),
        ("merges.txt", "h e l", r"line 1 is 'h e l', not two tokens"),
        ("merges.txt", "h ", r"line 1 is 'h ', not two tokens"),
        ("tokenizer_config.json", {"tokenizer_class": "RobertaTokenizer"}, "'RobertaTokenizer' cannot be read from"),
        ("tokenizer_config.json", {"tokenizer_class": 3}, "tokenizer_class must be a string, not 3"),
        ("tokenizer_config.json", {"eos_token": "<nowhere>"}, "eos_token is '<nowhere>', which is not in the vocab"),
        ("tokenizer_config.json", {"additional_special_tokens": "x"}, "additional_special_tokens must be a list of"),
        ("added_tokens.json", {"<t>": 7000}, r"'<t>' the id 7000, but vocab\.json has room for it at 422"),
        ("added_tokens.json", {"<t>": "x"}, r"added_tokens\.json must map tokens to ids, not '<t>' to 'x'"),
        ("added_tokens.json", "[]", r"added_tokens\.json must hold a JSON object, not a list"),
    ],
)  # fmt: skip
def test_damaged_files_are_refused_by_name(folder, name, content, message):
    write(folder, name, content)
    with pytest.raises(InvalidTokenizer, match=message) as raised:
        load_tokenizer(open_folder(folder, {"model_type": "gpt2"}))
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "added_tokens.json"])
def test_bytes_that_are_not_text_are_refused(folder, name):
    (folder / name).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidTokenizer, match=name):
        load_tokenizer(open_folder(folder, {"model_type": "gpt2"}))


def test_a_model_whose_class_nothing_names_is_refused(folder):
    with pytest.raises(InvalidTokenizer, match=r"tokenizer_class None cannot be read.*put its tokenizer\.json"):
        load_tokenizer(open_folder(folder, {"model_type": "llama"}))
