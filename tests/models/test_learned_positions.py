"""A model with a table of positions reads no row that the table lacks: not while drafting, padding or too long."""

import numpy as np
import pytest

import jaxinfer
from jaxinfer import SamplingParams
from jaxinfer.errors import InvalidOption
from tests.cli.conftest import run  # noqa: F401 - a fixture
from tests.decoding.scripted import Chain
from tests.models.tiny_opt import CONFIG, NUM_POSITIONS, opt_tensors, write_model
from tests.toys import write_byte_tokenizer

PROMPTS = [np.random.default_rng(length).integers(2, 258, length).tolist() for length in (NUM_POSITIONS - 9, 4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(write_byte_tokenizer(tmp_path_factory.mktemp("opt")), CONFIG, opt_tensors())


@pytest.fixture(scope="module")
def lm(folder):
    return jaxinfer.load(folder, dtype="float32")


@pytest.mark.exhaustive
def test_a_text_ends_where_the_positions_do_however_it_is_drafted(lm):
    sampling = SamplingParams(ignore_eos=True)
    plain = lm.generate(PROMPTS, max_new_tokens=99, sampling=sampling)
    assert [len(ids) + len(result.tokens) for ids, result in zip(PROMPTS, plain)] == [NUM_POSITIONS] * 2
    assert {result.finish_reason for result in plain} == {"length"}
    texts = tuple((*ids, *result.tokens) for ids, result in zip(PROMPTS, plain))
    for lies_from in (99, 2):
        drafted = lm.generate(PROMPTS, max_new_tokens=99, sampling=sampling, strategy=Chain(texts, 7, lies_from))
        assert [result.tokens for result in drafted] == [result.tokens for result in plain]


def test_padding_past_the_table_changes_nothing(lm, tmp_path):
    """A model with more positions, the first of them the same, gives the same logits to the longest text."""
    text = [np.random.default_rng(0).integers(2, 258, NUM_POSITIONS).tolist()]
    tensors = opt_tensors()
    name = "model.decoder.embed_positions.weight"
    tensors[name] = np.concatenate([tensors[name], np.full((100, tensors[name].shape[1]), 9.0, np.float32)])
    longer = write_model(tmp_path, {**CONFIG, "max_position_embeddings": NUM_POSITIONS + 100}, tensors)
    expected = jaxinfer.load(longer, dtype="float32").logits(text)
    np.testing.assert_allclose(np.asarray(lm.logits(text)), np.asarray(expected), atol=1e-5)


def test_a_text_beyond_the_positions_is_refused(lm, folder):
    text = [5] * (NUM_POSITIONS + 1)
    with pytest.raises(InvalidOption, match=r"a text has 25 tokens, but the model knows 24 positions: shorten it$"):
        lm.logits([[5], text])
    with pytest.raises(InvalidOption, match=r"the prompt has 25 tokens.*room for 24 with the answer: shorten it$"):
        lm.generate([text])
    with pytest.raises(InvalidOption, match="max_len 25 is not between 2 and the model's context of 24"):
        jaxinfer.load(folder, max_len=NUM_POSITIONS + 1)


def test_the_command_line_says_so_in_one_line(run, folder):  # noqa: F811 - the fixture
    outcome = run("generate", "x" * 40, "--model", folder)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.splitlines() == outcome.error_lines
    assert "40 tokens" in outcome.error_lines[0]
    assert "room for 24" in outcome.error_lines[0]
