"""Ids, text and chats of real vocabularies are those of transformers."""

import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.tokenizers import TextStream, load_tokenizer
from tests.late_imports import late
from tests.shared_data import shared_data
from tests.tokenizers import texts
from tests.tokenizers.vocabularies import open_folder, open_gguf, to_gguf_metadata

pytestmark = pytest.mark.parity
transformers = late("transformers")
tokenization = late("transformers.tokenization_utils_base")

ALL_TEXTS = texts.TEXTS + texts.SPECIAL_TEXTS
FOLDERS = ["models/smollm2-135m-instruct", "tokenizers/gpt2", "models/stories260K-hf"]


def read_sample() -> str:
    return shared_data("text/wikitext2_valid.txt").read_text(encoding="utf-8")[:20_000]


@pytest.mark.slow
@pytest.mark.parametrize("relative", FOLDERS)
def test_folder_ids_and_text_are_those_of_transformers(relative):
    folder = shared_data(relative)
    ours = load_tokenizer(open_folder(folder))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    for text in [*ALL_TEXTS, read_sample()]:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip), text


@pytest.mark.slow
def test_default_model_has_the_same_ids_from_its_gguf_vocabulary():
    folder = shared_data("models/smollm2-135m-instruct")
    ours = load_tokenizer(open_folder(folder))
    pipeline = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    from_gguf = load_tokenizer(open_gguf(to_gguf_metadata(pipeline, "smollm")))
    assert from_gguf.vocab_size == ours.vocab_size == 49152
    for text in [*ALL_TEXTS, read_sample()]:
        assert from_gguf.encode(text) == ours.encode(text), text


def test_gpt2_has_the_same_ids_from_a_gguf_vocabulary():
    folder = shared_data("tokenizers/gpt2")
    pipeline = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    from_gguf = load_tokenizer(open_gguf(to_gguf_metadata(pipeline, "gpt-2")))
    for text in [*ALL_TEXTS, read_sample()]:
        assert from_gguf.encode(text) == pipeline.encode(text).ids, text


def test_golden_prompts_of_the_default_model_are_reproduced():
    folder = shared_data("models/smollm2-135m-instruct")
    ours = load_tokenizer(open_folder(folder, json.loads((folder / "config.json").read_text())))
    assert (ours.bos_token_id, ours.eos_token_ids) == (1, (2,))


def test_default_chat_is_that_of_transformers():
    folder = shared_data("models/smollm2-135m-instruct")
    ours = load_tokenizer(open_folder(folder)).chat_template
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    theirs.chat_template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    chats = [
        [{"role": "user", "content": "What is the capital of France?"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "é 😀 {{ x }}"}],
        [{"role": role, "content": role} for role in ("user", "assistant", "user")],
    ]
    for chat in chats:
        for prompt in (True, False):
            expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
            assert ours is not None
            assert ours.render(chat, add_generation_prompt=prompt) == expected


def order_merges_by_score(source: Path) -> tokenizers.models.BPE:
    """Build the BPE that transformers 4 built, and published in tokenizer.json files.

    Transformers 5 orders the merges of a ``.model`` by id instead, and so joins runs of spaces first, which the
    model's scores put last: it then contradicts SentencePiece on text with two spaces in a row.
    """
    model = sentencepiece.SentencePieceProcessor(str(source))
    ids = range(model.vocab_size())
    vocabulary = {model.id_to_piece(token): token for token in ids}
    scores = {model.id_to_piece(token): model.get_score(token) for token in ids}
    merges = tokenization.generate_merges(vocabulary, scores)
    return tokenizers.models.BPE(vocabulary, merges, fuse_unk=True, byte_fallback=True)


@pytest.fixture(scope="module")
def mistral(tmp_path_factory):
    """Return our tokenizer and transformers' for the SentencePiece model, keyed by ``legacy``."""
    source = shared_data("tokenizers/mistral_v3_tokenizer.model")
    pairs = {}
    for legacy in (False, True):
        folder = tmp_path_factory.mktemp("mistral")
        (folder / "tokenizer.model").write_bytes(source.read_bytes())
        config = {"tokenizer_class": "LlamaTokenizer", "legacy": legacy, "add_bos_token": True}
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        theirs = transformers.LlamaTokenizer.from_pretrained(folder)
        theirs.backend_tokenizer.model = order_merges_by_score(source)
        pairs[legacy] = (load_tokenizer(open_folder(folder)), theirs)
    return pairs


@pytest.mark.slow
@pytest.mark.parametrize("legacy", [False, True])
def test_sentencepiece_ids_and_text_are_those_of_llama_tokenizer(mistral, legacy):
    ours, theirs = mistral[legacy]
    assert ours.vocab_size == len(theirs) == 32768
    for text in [*ALL_TEXTS, read_sample()]:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip), text


@settings(derandomize=True, max_examples=100, deadline=None)
@given(texts.words)
def test_sentencepiece_ids_of_any_text_are_those_of_llama_tokenizer(mistral, text):
    ours, theirs = mistral[False]
    assert ours.encode(text) == theirs.encode(text)


@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 32767), max_size=60))
def test_text_of_any_sentencepiece_ids_is_that_of_llama_tokenizer(mistral, ids):
    ours, theirs = mistral[False]
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    stream = TextStream(ours)
    assert stream.push(ids) + stream.finish() == ours.decode(ids)
