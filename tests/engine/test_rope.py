"""Texts whose rotation follows their length: they begin anew where it changes, and share no page across the change."""

from dataclasses import replace

import numpy as np
import pytest

from jaxinfer import LanguageModel
from jaxinfer.engine.core import rotary_regime
from jaxinfer.models.config import LayerKind, Rope, RopeScaling
from tests.decoding.rows import PLAIN, SAMPLINGS, request, run
from tests.engine.harness import SMALL, Arrival, Harness, tokens_of
from tests.toys import TINY_LLAMA, float32_backend, random_params

ORIGINAL = 24
LONGROPE = RopeScaling(
    "longrope", 8.0, ORIGINAL, short_factors=(1.0, 1.1, 1.3, 1.6), long_factors=(2.0, 5.0, 9.0, 20.0)
)
DYNAMIC = RopeScaling("dynamic", 4.0, ORIGINAL)


def model(scaling: RopeScaling) -> LanguageModel:
    rope = Rope(10000.0, 8, scaling)
    config = replace(TINY_LLAMA, max_position=192, layer_pattern=(LayerKind(rope),))
    return LanguageModel(config, random_params(config), float32_backend())


@pytest.mark.parametrize(
    "scaling",
    [
        pytest.param(LONGROPE, id="longrope", marks=pytest.mark.slow),
        pytest.param(DYNAMIC, id="dynamic", marks=pytest.mark.exhaustive),
    ],
)
def test_prompts_that_begin_alike_are_what_each_is_alone(scaling):
    """Some grow past the original length on their way, some begin beyond it; all begin with the same pages."""
    lm = model(scaling)
    text = np.random.default_rng(1).integers(2, 258, 60).tolist()
    requests = [request(text[:length], 20, one) for length, one in zip((17, 20, 24, 33, 60), SAMPLINGS)]
    expected = run(lm, requests)
    harness = Harness(lm, PLAIN, replace(SMALL, pages=40))
    for steps in ((0, 0, 0, 0, 0), (12, 9, 6, 3, 0)):
        served = harness.serve([Arrival(step, one) for step, one in zip(steps, requests)])
        assert [tokens_of(sequence) for sequence in served] == [row.tokens for row in expected]
        for sequence, row in zip(served, expected):
            assert sequence.origin.request.result(0.0).logprobs == tuple(row.logprobs)
    assert sum(sequence.cached_tokens for sequence in served) > 0


def test_regimes():
    config = {name: model(scaling).config for name, scaling in (("longrope", LONGROPE), ("dynamic", DYNAMIC))}
    lengths = (5, ORIGINAL, ORIGINAL + 1, 60)
    kept = {name: [rotary_regime(one, length) for length in lengths] for name, one in config.items()}
    assert [kept["longrope"].index(regime) for regime in kept["longrope"]] == [0, 0, 2, 2]
    assert [kept["dynamic"].index(regime) for regime in kept["dynamic"]] == [0, 0, 2, 3]
    assert len({rotary_regime(TINY_LLAMA, length) for length in lengths}) == 1
