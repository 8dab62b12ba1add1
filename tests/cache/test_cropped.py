"""A cropped text goes on past learned positions as nanoGPT does, its last block read as a text of its own."""

from dataclasses import replace

import numpy as np
import pytest

from jaxinfer import SamplingParams
from jaxinfer.cache.layouts import CropLayout, parse_layout
from jaxinfer.errors import InvalidOption
from jaxinfer.language_model import LanguageModel
from jaxinfer.models.config import LayerKind
from tests.toys import TINY_LLAMA, float32_backend, random_params

CONTEXT = 20
CONFIG = replace(
    TINY_LLAMA, layer_pattern=(LayerKind(None),), learned_positions=0, max_position=CONTEXT, eos_token_ids=()
)
PARAMS = random_params(CONFIG)
PROMPTS = [list(range(5, 8)), list(range(40, 40 + CONTEXT)), list(range(90, 90 + 2 * CONTEXT + 7))]


def model(cache: str) -> LanguageModel:
    return LanguageModel(CONFIG, PARAMS, float32_backend(), cache=cache)


@pytest.fixture(scope="module")
def dense() -> LanguageModel:
    return model("dense")


def grown(dense, prompt, count, keep):
    """Return greedy tokens, each from a forward pass over the block that its text has: nanoGPT's loop for keep = C."""
    text, begin = list(prompt), 0
    for _ in range(count):
        while len(text) - begin > CONTEXT:
            begin += CONTEXT + 1 - keep
        text.append(int(np.argmax(dense.logits([text[begin:]])[0, -1])))
    return text[len(prompt) :]


@pytest.mark.parametrize("keep", [pytest.param(CONTEXT, marks=pytest.mark.exhaustive), 13])
def test_each_token_is_drawn_from_the_last_block(dense, keep):
    found = model(f"crop:keep={keep}").generate(PROMPTS, max_new_tokens=19)
    assert [list(result.tokens) for result in found] == [grown(dense, prompt, 19, keep) for prompt in PROMPTS]


@pytest.mark.slow
def test_layers_with_windows_have_no_ring_that_remembers_the_text_before_a_block():
    """GPT-Neo's layers, the windowed one first."""
    config = replace(CONFIG, max_position=200, num_layers=2, layer_pattern=(LayerKind(None, window=8), LayerKind(None)))
    params = random_params(config)
    lm, dense = (LanguageModel(config, params, float32_backend(), cache=cache) for cache in ("crop:keep=40", "dense"))
    parts = lm.programs.create_cache(1, 201, 1, ()).parts
    assert [type(part).__name__ for part in parts] == ["CroppedCache"] * 2
    prompt = np.random.default_rng(3).integers(3, config.vocab_size, 198).tolist()
    (found,) = lm.generate([prompt], max_new_tokens=6)
    text = [*prompt, *found.tokens]
    block = text[200 + 1 - 40 : -1]
    assert int(np.argmax(dense.logits([block])[0, -1])) == text[-1]


@pytest.mark.exhaustive
def test_neither_strategy_nor_company_changes_a_sampled_text():
    lm = model("crop")
    sampling = SamplingParams(temperature=0.3, seed=5, repetition_penalty=1.1, logprobs=True)
    together = lm.generate(PROMPTS, max_new_tokens=45, sampling=sampling)
    (alone,) = lm.generate(PROMPTS[:1], max_new_tokens=45, sampling=sampling)
    assert (alone.tokens, alone.logprobs) == (together[0].tokens, together[0].logprobs)
    drafted = lm.generate(PROMPTS, max_new_tokens=45, sampling=sampling, strategy="prompt_lookup")
    assert [result.tokens for result in drafted] == [result.tokens for result in together]


def test_what_it_does_not_go_with_is_refused_by_name():
    assert parse_layout("crop:keep=7") == CropLayout(7)
    for spec, config, named in (
        ("crop", TINY_LLAMA, "llama has no learned positions"),
        (f"crop:keep={CONTEXT + 1}", CONFIG, f"keep=21 is more than the context of {CONTEXT}"),
    ):
        with pytest.raises(InvalidOption, match=named):
            LanguageModel(config, PARAMS, float32_backend(), cache=spec)
    with pytest.raises(InvalidOption, match="cache crop runs on one device"):
        LanguageModel(CONFIG, PARAMS, float32_backend(), cache="crop", mesh="data=1")
    lm = model("crop")
    for strategy in ("layerskip:exit_layer=1", "beam", "triforce"):
        with pytest.raises(InvalidOption, match="dense cache"):
            lm.generate([[5, 6]], strategy=strategy)
    with pytest.raises(InvalidOption, match="an engine has a paged cache of its own"):
        lm.engine()
