"""A draft model on devices of its own changes neither the text nor a step: its drafts are only there sooner."""

from dataclasses import replace

import jax
import pytest

from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.decoding.registry import parse_strategy
from jaxinfer.decoding.strategies.draft_model import DraftModel
from jaxinfer.errors import InvalidOption
from jaxinfer.parallel.mesh import parse_mesh
from tests.decoding.strategy_cases import perturbed
from tests.toys import TINY_LLAMA, float32_backend, random_params

PROMPTS = [[1, 70, 80, 90], [1, 5, 6, 7, 8, 9, 10], [3], [200, 100]]
FORCED = SamplingParams(logit_bias={44: 1000.0})
SAMPLING = [
    SamplingParams(),
    SamplingParams(temperature=0.9, top_p=0.9, seed=5),
    SamplingParams(temperature=1.3, top_p=0.5, repetition_penalty=1.2, seed=7, logprobs=True),
    FORCED,
]


def model(mesh: str | None = None) -> LanguageModel:
    built = None if mesh is None else parse_mesh(mesh).build(jax.devices()[: parse_mesh(mesh).num_devices])
    return LanguageModel(TINY_LLAMA, random_params(TINY_LLAMA), float32_backend(), mesh=built)


def drafter(spec: str) -> DraftModel:
    strategy = parse_strategy(f"draft_model:{spec}")
    assert isinstance(strategy, DraftModel)
    params = perturbed(random_params(TINY_LLAMA), 0.1)
    return replace(strategy, config=TINY_LLAMA, backend=float32_backend(), params=params)


@pytest.mark.parametrize(
    ("mesh", "devices"),
    [
        pytest.param(None, 1, marks=pytest.mark.exhaustive),
        pytest.param("tensor=2", 2, marks=pytest.mark.exhaustive),
        pytest.param("data=2", 1, marks=pytest.mark.exhaustive),
        pytest.param("pipeline=2", 4, marks=pytest.mark.exhaustive),
    ],
)
def test_text_and_steps_are_those_of_a_draft_model_that_waits(mesh, devices):
    """In a batch whose rows part, and in one of texts that are known, whose drafts are always there."""
    waiting = model().generate(PROMPTS, max_new_tokens=24, sampling=SAMPLING, strategy=drafter("num_draft_tokens=3"))
    lm, strategy = model(mesh), drafter(f"num_draft_tokens=3,devices={devices}")
    found = lm.generate(PROMPTS, max_new_tokens=24, sampling=SAMPLING, strategy=strategy)
    for one, other in zip(found, waiting):
        assert one.tokens == other.tokens
        assert one.from_draft == other.from_draft
        assert one.stats.accepted_by_depth == other.stats.accepted_by_depth
        assert (one.stats.steps, one.stats.drafted) == (other.stats.steps, other.stats.drafted)
    assert sum(one.stats.accepted for one in found) > 0
    for one in lm.generate(PROMPTS, max_new_tokens=24, sampling=FORCED, strategy=strategy):
        assert one.tokens == (44,) * 24
        assert one.stats.drafted_ahead == one.stats.steps - 1 > 0
    # Prefill, a step; the drafter's start, its chains, and those ahead.
    assert sum(programs.compilations for programs in lm.programs.all_sets) == 5


def test_where_no_device_is_left_it_says_so():
    lm = model(f"tensor={len(jax.devices()) // 2},data=2")
    with pytest.raises(InvalidOption, match=r"devices=2, but the target leaves 0 of \d+: build its mesh of fewer"):
        lm.resolve(drafter("devices=2"))
