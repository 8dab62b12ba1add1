"""A user's mistake raises one of the library's errors, with one line that names it; never another exception."""

import pytest
import tokenizers
from jaxtyping import config as typing_config

import jaxinfer
from jaxinfer import DecoderConfig, LanguageModel, SamplingParams
from jaxinfer.errors import CheckpointNotFound, InvalidCheckpoint, InvalidOption, InvalidTokenizer, JaxinferError
from tests.toys import VOCAB_SIZE


@pytest.fixture(scope="module")
def folder(tiny_llama_folder):
    return tiny_llama_folder()


@pytest.fixture(scope="module")
def lm(folder):
    return jaxinfer.load(folder, max_len=32)


def check_refused(kind: type[JaxinferError], pattern: str, function) -> None:
    with pytest.raises(kind, match=pattern) as caught:
        function()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) <= 300


GENERATE = {
    "no tokens": ([[]], {}, "the prompt is empty"),
    "empty text": ("", {}, "the prompt is empty"),
    "an empty text among others": (["The", ""], {}, "the prompt is empty"),
    "an id outside the vocabulary": ([[VOCAB_SIZE]], {}, f"token id {VOCAB_SIZE} is not in the vocabulary"),
    "a negative id": ([[3, -1]], {}, "token id -1 is not in the vocabulary"),
    "half a surrogate pair": ("\ud800", {}, "not valid Unicode"),
    "a prompt as long as the context": ([[5] * 32], {}, "the prompt has 32 tokens, but the context has room for 32"),
    "a prompt longer than the context": ("x" * 500, {}, "the prompt has 500 tokens"),
    "no new tokens": ("The", {"max_new_tokens": 0}, "max_new_tokens 0"),
    "negative new tokens": ("The", {"max_new_tokens": -3}, "max_new_tokens -3"),
    "a yes for a number": ("The", {"max_new_tokens": True}, "max_new_tokens True"),
    "an unknown strategy": (
        "The",
        {"strategy": "magic"},
        "unknown strategy 'magic'; the strategies are autoregressive",
    ),
    "an unknown option": ("The", {"strategy": "autoregressive:k=2"}, "unknown option 'k' of strategy autoregressive"),
    "an option given twice": ("The", {"strategy": "suffix:past=4,past=5"}, "strategy suffix: past= is given twice"),
    "nodes before the end": ("The", {"strategy": "suffix+nodes=4+medusa"}, "nodes=4 bounds all drafters of a sum"),
    "a depth of a tree that has one": ("The", {"strategy": "eagle:tree=3.2,depth=2"}, "leave depth= out"),
    "thresholds of another way": ("The", {"strategy": "medusa:epsilon=0.2"}, "epsilon= is of verify=typical"),
    "confidence that cuts nothing": (
        "The",
        {"strategy": "draft_model:model=self,layers=1,confidence=0.9"},
        "confidence= is of schedule=confidence",
    ),
    "a length that never grows": (
        "The",
        {"strategy": "draft_model:model=self,layers=1,num_draft_tokens=3,max_draft_tokens=9"},
        "lengths of schedule=constant never grow",
    ),
    "a model that drafts for itself": ("The", {"strategy": "triforce:drafter=self"}, "name a smaller one"),
    "a tree of heads that there are not": ("The", {"strategy": "token_recycling:tree=own"}, "comes with heads"),
    "rows that are none": ("The", {"batch_size": 0}, "batch_size 0"),
    "too few sampling parameters": (
        ["The", "A", "One"],
        {"sampling": [SamplingParams()] * 2},
        "2 sampling parameters for 3 prompts",
    ),
    "a bias outside the vocabulary": (
        "The",
        {"sampling": SamplingParams(logit_bias={VOCAB_SIZE: 1.0})},
        f"logit_bias names token {VOCAB_SIZE}: the vocabulary has ids 0 to {VOCAB_SIZE - 1}",
    ),
}


@pytest.mark.parametrize("name", GENERATE)
def test_generate_refuses(lm, name):
    prompts, options, pattern = GENERATE[name]
    check_refused(InvalidOption, pattern, lambda: lm.generate(prompts, **options))


WRONG_TYPES = {
    "a number for a strategy": (lambda lm, _: lm.generate("The", strategy=3), "strategy 3 is neither"),
    "no strategy": (lambda lm, _: lm.generate("The", strategy=None), "strategy None is neither"),
    "no sampling parameters": (lambda lm, _: lm.generate("The", sampling=[None]), r"sampling is .*, not \[None\]"),
    "a number for prompts": (lambda lm, _: lm.generate(3), "prompts 3 are neither"),
    "numbers for prompts": (lambda lm, _: lm.generate([3]), "a prompt is a text or a sequence of token ids, not 3"),
    "fractions of tokens": (lambda lm, _: lm.generate([[1.5]]), r"not \[1.5\]"),
    "an id of many digits": (lambda lm, _: lm.generate([[10**5000]]), "thousands of digits is not in the vocabulary"),
    "a text for rows": (lambda lm, _: lm.generate("The", batch_size="2"), "batch_size '2' is not a whole number"),
    "a number to stream": (lambda lm, _: lm.stream(3), "not 3"),
    "a number for logits": (lambda lm, _: lm.logits(3), "3 is not a list"),
    "a number for a folder": (lambda lm, _: lm.save(3), "folder 3 is no text"),
    "a number for a model": (lambda *_: jaxinfer.load(3), "model 3 is no text"),
    "a number for weights": (lambda *_: jaxinfer.load("m", weights=8), "weights 8 is no text"),
    "a number for a revision": (lambda _, folder: jaxinfer.load(folder, revision=3), "revision 3 is no text"),
    "a number for a dtype": (lambda _, folder: jaxinfer.load(folder, dtype=3), "dtype 3 is not a text"),
    "a number for a cache": (lambda _, folder: jaxinfer.load(folder, cache=3), "cache 3 is neither"),
    "a number for a mesh": (lambda _, folder: jaxinfer.load(folder, mesh=3), "mesh 3 is neither"),
    "a text for a length": (lambda _, folder: jaxinfer.load(folder, max_len="9"), "max_len '9' is not a whole number"),
    "a cache of many digits": (lambda _, f: jaxinfer.load(f, cache="paged:page=" + "9" * 5000), "cache paged: page="),
    "a strategy of many letters": (lambda lm, _: lm.generate("The", strategy="x" * 5000), "unknown strategy"),
    "a strategy of two lines": (lambda lm, _: lm.generate("The", strategy="a\nb\x1b"), r"strategy 'a\\nb\\x1b'"),
    "a folder of many letters": (lambda lm, _: lm.generate("The", strategy="medusa:heads=" + "x" * 5000), "no path"),
    "a tree of many letters": (
        lambda lm, folder: lm.generate("The", strategy=f"medusa:heads={folder},tree=" + "x" * 5000),
        "no path",
    ),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_arguments_of_other_types_are_refused(lm, folder, name, monkeypatch):
    monkeypatch.setattr(typing_config, "jaxtyping_disable", True)  # as users call it, whose types nobody checks
    call, pattern = WRONG_TYPES[name]
    check_refused(InvalidOption, pattern, lambda: call(lm, folder))


@pytest.mark.parametrize("kind", [InvalidOption, CheckpointNotFound, InvalidCheckpoint])
def test_an_error_is_one_line_with_its_beginning_and_its_end(kind):
    assert str(kind("a\nfolder\x1b: is wrong")) == "a folder\\x1b: is wrong"
    for length in (300, 301, 10_000):
        message = str(kind("begin " + "x" * (length - 10) + " end"))
        assert len(message) == 300
        assert (message[:6], message[-4:]) == ("begin ", " end")
        assert (" ... " in message) == (length > 300)


def test_a_refused_call_leaves_the_model_usable(lm):
    check_refused(InvalidOption, "vocabulary", lambda: lm.generate([[3], [-1]]))
    assert len(lm.generate([[3, 4]], max_new_tokens=2)[0].tokens) == 2
    assert lm.generate([]) == []


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0}, "top_p=0"),
        ({"top_p": 2}, "top_p=2"),
        ({"top_k": -4}, "top_k=-4"),
        ({"min_p": 1.5}, "min_p=1.5"),
        ({"n": 0}, "n=0"),
        ({"n": 10**9}, "n=1000000000"),
        ({"seed": 10**5000}, "thousands of digits"),
        ({"temperature": 10**5000}, "thousands of digits"),
        ({"stop": 3}, "stop=3"),
        ({"seed": -1}, "seed=-1"),
        ({"stop": [""]}, "stop=''"),
    ],
)
def test_sampling_parameters_refuse(options, pattern):
    check_refused(InvalidOption, pattern, lambda: SamplingParams(**options))


def test_streaming_refuses_several_samples(lm):
    check_refused(InvalidOption, "n is 2", lambda: list(lm.stream("The", sampling=SamplingParams(n=2))))


def test_streaming_refuses_at_once_and_not_at_its_first_piece(lm):
    check_refused(InvalidOption, "the prompt is empty", lambda: lm.stream(""))


@pytest.mark.parametrize(
    ("ids", "pattern"),
    [([[]], "empty"), ([[VOCAB_SIZE]], "not in the vocabulary"), ([], "no text")],
)
def test_logits_refuses(lm, ids, pattern):
    check_refused(InvalidOption, pattern, lambda: lm.logits(ids))


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"dtype": "int3"}, "unknown dtype 'int3'; use one of float32"),
        ({"dtype": "float64"}, "64-bit mode"),
        ({"max_len": 1}, "max_len 1 is not between 2"),
        ({"max_len": -5}, "max_len -5 is not between 2"),
        ({"max_len": 4096}, "max_len 4096 is not between 2 and the model's context of 1024"),
    ],
)
def test_load_refuses(folder, options, pattern):
    check_refused(InvalidOption, pattern, lambda: jaxinfer.load(folder, **options))


def test_load_refuses_a_path_that_does_not_exist(tmp_path):
    check_refused(CheckpointNotFound, "no such file or folder", lambda: jaxinfer.load(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError):
        jaxinfer.load(tmp_path / "absent")


def test_a_model_without_a_tokenizer_takes_ids_only(lm):
    bare = LanguageModel(lm.config, lm.params, lm.backend)
    assert isinstance(bare.config, DecoderConfig)
    check_refused(InvalidTokenizer, "no tokenizer", lambda: bare.generate("The"))
    check_refused(InvalidTokenizer, "no tokenizer", lambda: bare.generate([[3]], sampling=SamplingParams(stop="x")))
    (result,) = bare.generate([[3, 4]], max_new_tokens=2)
    assert (len(result.tokens), result.text, result.prompt) == (2, "", None)


@pytest.mark.parametrize("num_more", [1, 0])
def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows_is_refused_at_load(folder, tmp_path, num_more):
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).symlink_to(folder / file)
    pipeline = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    pipeline.add_tokens([f"<more {index}>" for index in range(VOCAB_SIZE + num_more - pipeline.get_vocab_size())])
    pipeline.save(str(tmp_path / "tokenizer.json"))
    if num_more:
        message = f"tokenizer has {VOCAB_SIZE + 1} ids, but the embedding only {VOCAB_SIZE} rows"
        check_refused(InvalidCheckpoint, message, lambda: jaxinfer.load(tmp_path))
    else:
        assert jaxinfer.load(tmp_path).tokenizer.vocab_size == VOCAB_SIZE


def test_a_special_token_without_a_row_of_the_embedding_is_refused_in_a_prompt_only(folder, tmp_path):
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).symlink_to(folder / file)
    pipeline = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    pipeline.add_tokens([f"<more {index}>" for index in range(VOCAB_SIZE - pipeline.get_vocab_size())])
    pipeline.add_special_tokens(["<image>"])
    pipeline.save(str(tmp_path / "tokenizer.json"))
    lm = jaxinfer.load(tmp_path)
    assert len(lm.generate("The", max_new_tokens=2)[0].tokens) == 2
    check_refused(InvalidOption, f"token id {VOCAB_SIZE} is not in the vocabulary", lambda: lm.generate("The <image>"))


def test_a_damaged_tokenizer_is_told_when_text_needs_it(folder, tmp_path):
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).symlink_to(folder / file)
    (tmp_path / "tokenizer.json").write_text("{")
    lm = jaxinfer.load(tmp_path)
    check_refused(InvalidTokenizer, r"tokenizer\.json is damaged", lambda: lm.generate("The"))
    assert len(lm.generate([[3, 4]], max_new_tokens=2)[0].tokens) == 2


def test_chat_needs_a_template(lm, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / file).symlink_to(lm.source.folder / file)
    check_refused(
        InvalidTokenizer, "no chat template", lambda: jaxinfer.load(tmp_path).chat([{"role": "user", "content": "Hi"}])
    )
