"""Byte-level BPE from tokenizer.json and from GGUF metadata, on vocabularies trained here."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from tokenizers import AddedToken, Regex, pre_tokenizers

from jaxinfer.errors import InvalidOption, InvalidTokenizer
from jaxinfer.tokenizers import Tokenizer, load_tokenizer
from jaxinfer.tokenizers.byte_level.library import build_pipeline
from jaxinfer.tokenizers.byte_level.word_splits import WORD_SPLITS
from tests.tokenizers import texts
from tests.tokenizers.vocabularies import SPECIAL, open_folder, open_gguf, to_gguf_metadata, train_byte_level


@pytest.fixture(scope="module")
def pipeline() -> tokenizers.Tokenizer:
    return train_byte_level()


@pytest.fixture(scope="module")
def tokenizer(pipeline, tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("byte_level")
    (folder / "tokenizer.json").write_text(pipeline.to_str(), encoding="utf-8")
    return load_tokenizer(open_folder(folder))


@pytest.mark.parametrize("text", texts.TEXTS + texts.SPECIAL_TEXTS)
def test_gguf_vocabulary_gives_the_ids_of_tokenizer_json(tokenizer, pipeline, text):
    from_gguf = load_tokenizer(open_gguf(to_gguf_metadata(pipeline)))
    assert from_gguf.vocab_size == tokenizer.vocab_size == pipeline.get_vocab_size()
    assert from_gguf.encode(text) == tokenizer.encode(text) == pipeline.encode(text).ids


@pytest.mark.slow
@settings(derandomize=True, max_examples=60, deadline=None)
@given(texts.words)
def test_any_text_comes_back_from_its_ids(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_special_tokens_in_the_text_are_parsed_and_left_out_of_decoding(tokenizer):
    ids = tokenizer.encode("<|im_start|>hello<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>hello<|im_end|>"


def test_ids_outside_the_vocabulary_decode_to_nothing(tokenizer):
    ids = tokenizer.encode("hello")
    assert tokenizer.decode([*ids, tokenizer.vocab_size + 7, -1]) == "hello"


def test_truncation_and_padding_of_the_file_are_disabled(pipeline, tmp_path):
    altered = tokenizers.Tokenizer.from_str(pipeline.to_str())
    altered.enable_truncation(3)
    altered.enable_padding(length=5000, pad_token=SPECIAL[0])
    (tmp_path / "tokenizer.json").write_text(altered.to_str(), encoding="utf-8")
    text = "hello world " * 20
    assert load_tokenizer(open_folder(tmp_path)).encode(text) == pipeline.encode(text).ids


def test_gguf_tokens_keep_their_kinds(pipeline):
    added = tokenizers.Tokenizer.from_str(pipeline.to_str())
    added.add_tokens([AddedToken("<tool>", normalized=False)])
    metadata = to_gguf_metadata(added, bos_token_id=1, eos_token_id=2, eot_token_id=0, add_bos_token=True)
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    tokenizer = load_tokenizer(open_gguf(metadata))
    ids = tokenizer.encode("a<tool>b")
    assert ids == [1, *added.encode("a<tool>b").ids]
    assert tokenizer.decode(ids) == "a<tool>b"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2, 0))
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render([{"role": "user", "content": "x"}]) == "<|im_start|>x<|im_end|>"


def test_gguf_end_token_is_added_when_asked(pipeline):
    metadata = to_gguf_metadata(pipeline, bos_token_id=1, eos_token_id=2, add_bos_token=False, add_eos_token=True)
    tokenizer = load_tokenizer(open_gguf(metadata))
    assert tokenizer.encode("")[-1:] == [2]
    assert tokenizer.encode("", add_special_tokens=False) == []


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["a", " 1234", " b", "\n ", " c", "'s"]),
        ("smollm", ["a", " ", "1", "2", "3", "4", " b", "\n ", " c", "'s"]),
        ("llama-bpe", ["a", " ", "123", "4", " b", "\n", " ", " c", "'s"]),
        ("qwen2", ["a", " ", "1", "2", "3", "4", " b", "\n", " ", " c", "'s"]),
        ("phi-2", ["a", " 1234", " b", "\n ", " c", "'s"]),
        ("llama3", ["a", " ", "123", "4", " b", "\n", " ", " c", "'s"]),
        ("llama-v3", ["a", " ", "123", "4", " b", "\n", " ", " c", "'s"]),
        ("dbrx", ["a", " ", "123", "4", " b", "\n", " ", " c", "'s"]),
        ("smaug-bpe", ["a", " ", "123", "4", " b", "\n", " ", " c", "'s"]),
        ("deepseek-r1-qwen", ["a", " ", "1", "2", "3", "4", " b", "\n", " ", " c", "'s"]),
        ("tekken", ["a", " ", "1", "2", "3", "4", " b", "\n", " ", " c", "'s"]),
        ("gpt-4o", ["a", " ", "123", "4", " b", "\n", " ", " c", "'s"]),
        ("glm4", ["a", " ", "123", "4", " b", "\n", " ", " c", "'s"]),
        ("stablelm2", ["a", " ", "1", "2", "3", "4", " b", "\n", " ", " c", "'s"]),
        ("command-r", ["a", " ", "1", "2", "3", "4", " b", "\n ", " c", "'s"]),
        ("falcon", ["a", " ", "123", "4", " b", "\n ", " c", "'", "s"]),
        ("bloom", ["a", " 1234", " b", "\n ", " c", "'s"]),
        ("deepseek-llm", ["a", " ", "1", "2", "3", "4", " b", "\n", " ", " c", "'", "s"]),
        ("deepseek-coder", ["a", " ", "1", "2", "3", "4", " b", "\n", " ", " c", "'", "s"]),
        ("deepseek-v3", ["a", " ", "123", "4", " b", "\n", " ", " c", "'s"]),
    ],
)
def test_each_gguf_word_split_cuts_its_own_way(pipeline, pre, words):
    """Merge every pair of bytes that a word holds, so that the tokens are the words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    merges: list[str] = []
    names = list(alphabet)
    for word in ["a", " 1234", "1234", "123", " b", "\n ", " c", "'s"]:
        letters = to_bytes.pre_tokenize_str(word)[0][0]
        for size in range(2, len(letters) + 1):
            if letters[:size] not in names:
                names.append(letters[:size])
                merges.append(f"{letters[: size - 1]} {letters[size - 1]}")
    metadata = to_gguf_metadata(pipeline, pre)
    metadata |= {"tokenizer.ggml.tokens": names, "tokenizer.ggml.merges": merges}
    metadata["tokenizer.ggml.token_type"] = [1] * len(names)
    tokenizer = load_tokenizer(open_gguf(metadata))
    assert [tokenizer.decode([token]) for token in tokenizer.encode("a 1234 b\n  c's")] == words


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        # Its signs are a range that has the letters of ASCII, too.
        ("deepseek-llm", [*("Gr", "öß", "e"), " ", "東京タワー서울", " ", *"12345", " привет", *"!\r\n"]),
        ("deepseek-coder", ["Größe", " ", "東京タワー서울", " ", *"12345", " привет", *"!\r\n"]),
        ("deepseek-v3", ["Größe", " ", "東京タワー", "서울", " ", "123", "45", " привет", "!\r\n"]),
        ("falcon", ["Größe", " 東京タワー서울", " ", "123", "45", " привет", "!", "\r\n"]),
        ("bloom", ["Größe", " 東京タワー서울", " 12345", " привет", "!\r\n"]),
    ],
)
def test_splits_of_several_patterns_cut_several_scripts(pre, words):
    """Each pattern cuts what those before it left."""
    text = "Größe 東京タワー서울 12345 привет!\r\n"
    splitter = build_pipeline({}, [], WORD_SPLITS[pre], source="").pre_tokenizer
    assert splitter is not None
    pieces = splitter.pre_tokenize_str(text)
    assert [text[start:stop] for _, (start, stop) in pieces] == words


def test_llama_3_vocabulary_adds_its_first_token_where_the_file_is_silent(pipeline):
    with_bos = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"}
    for pre in WORD_SPLITS:
        expected = [1] if pre in with_bos else []
        assert load_tokenizer(open_gguf(to_gguf_metadata(pipeline, pre, bos_token_id=1))).encode("") == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "t5"}, r"tokenizer\.ggml\.model 't5' is not supported.*'llama'.*Hugging Face folder"),
        ({"model": None}, r"tokenizer\.ggml\.model None is not supported"),
        ({"pre": "default"}, r"tokenizer\.ggml\.pre 'default' is not supported, only bloom, .*stablelm2"),
        ({"pre": "viking"}, r"tokenizer\.ggml\.pre 'viking' is not supported"),
        ({"pre": None}, r"tokenizer\.ggml\.pre None is not supported"),
        ({"pre": "x" * 500}, r"tokenizer\.ggml\.pre 'x{70,80}"),
        ({"pre": ["x"]}, r"tokenizer\.ggml\.pre \['x'\]"),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens must be a list of strings"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, r"names a token twice"),
        ({"merges": ["ab"]}, r"merges holds 'ab'"),
        ({"merges": ["nothere either"]}, r"merges do not fit the tokens"),
        ({"token_type": [1]}, r"token_type must have one entry a token"),
        ({"eos_token_id": 10**6}, r"eos_token_id is 1000000, outside the"),
        ({"bos_token_id": "<s>"}, r"bos_token_id is '<s>'"),
        ({"bos_token_id": True}, r"bos_token_id is True"),
        ({"add_bos_token": "yes"}, r"add_bos_token must be true or false, not 'yes'"),
    ],
)
def test_damaged_gguf_vocabulary_is_refused_by_name(pipeline, change, message):
    with pytest.raises(InvalidTokenizer, match=message) as raised:
        load_tokenizer(
            open_gguf(to_gguf_metadata(pipeline, **change) if "pre" in change else _change(pipeline, change))
        )
    assert "\n" not in str(raised.value)


def _change(pipeline, change):
    return to_gguf_metadata(pipeline) | {f"tokenizer.ggml.{key}": value for key, value in change.items()}


def test_text_that_is_not_unicode_is_refused(tokenizer):
    with pytest.raises(InvalidOption, match="not valid Unicode at character 1"):
        tokenizer.encode("a\udcffb")


def test_old_files_of_one_vocabulary_need_no_name_of_their_split(pipeline):
    """GPT-2 and Phi-2 have one vocabulary each, so that a file from before the key was is read by its architecture."""
    text = "a 1234 b\n  c's"
    for architecture, pre in (("gpt2", "gpt-2"), ("phi2", "phi-2")):
        old = to_gguf_metadata(pipeline) | {"tokenizer.ggml.pre": None, "general.architecture": architecture}
        expected = load_tokenizer(open_gguf(to_gguf_metadata(pipeline, pre))).encode(text)
        assert load_tokenizer(open_gguf(old)).encode(text) == expected
    with pytest.raises(InvalidTokenizer, match=r"tokenizer\.ggml\.pre None"):
        load_tokenizer(open_gguf(old | {"general.architecture": "llama"}))


@pytest.mark.parity
def test_word_splits_of_later_models_are_those_of_transformers():
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    theirs = mapping.GGUF_PRE_TOKENIZER_SPLITS
    assert {"tekken", "gpt-4o", "llama3", "dbrx", "deepseek-r1-qwen"} <= theirs.keys()
    for name in WORD_SPLITS.keys() & theirs.keys():
        assert WORD_SPLITS[name].pattern == theirs[name], name


@pytest.mark.parity
def test_word_splits_are_those_of_transformers():
    pytest.importorskip("transformers")
    import inspect

    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2 import Qwen2Tokenizer
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    assert WORD_SPLITS["qwen2"].pattern == PRETOKENIZE_REGEX
    assert WORD_SPLITS["llama-bpe"].pattern == inspect.signature(TikTokenConverter).parameters["pattern"].default
    trained = train_byte_level(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    )
    model = json.loads(trained.to_str())["model"]
    theirs = Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])
    ours = load_tokenizer(open_gguf(to_gguf_metadata(trained, "qwen2")))
    for text in texts.TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
