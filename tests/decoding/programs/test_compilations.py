"""A strategy compiles one program for prefill and one for all steps, anew for each bucket of shapes.

That one compilation serves long texts, second calls and other sampling parameters is tested for each registered
strategy where its long texts are (`tests.decoding.test_exactness`), and here for those that have a loop of their own.
"""

import pytest

import jaxinfer
from jaxinfer import SamplingParams
from jaxinfer.decoding.registry import STRATEGIES
from jaxinfer.decoding.runner import start_batch
from tests.decoding.rows import request
from tests.decoding.strategy_cases import CASES
from tests.toys import encode_bytes

PROMPTS = ("The quick", "A small otter watched the", "One grey heron f", "The old badger")
NUM_STEPS = 50
SAMPLINGS = (SamplingParams(), SamplingParams(logit_bias={70: 1.0}, repetition_penalty=1.1, min_new_tokens=4))


@pytest.fixture
def lm(tiny_llama_folder):
    return jaxinfer.load(tiny_llama_folder())


def count_compilations(lm, strategy, prompts, limit: int, sampling: SamplingParams, eos_token_ids=()) -> int:
    """Decode a batch step by step, and return how many programs have been compiled so far."""
    requests = [request(encode_bytes(prompt), limit, sampling) for prompt in prompts]
    batch = start_batch(lm.programs, lm.params, strategy, requests, eos_token_ids, lm.max_len)
    while not batch.done:
        batch.advance(1)
    if not eos_token_ids:
        assert max(batch.counts(row).steps for row in range(len(requests))) >= min(limit - 1, NUM_STEPS)
    return lm.programs.compilations


# The ordinary tests of tree search count its programs too, with functions that take turns.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "beam" else pytest.mark.exhaustive)
        for name in STRATEGIES
        if name not in CASES
    ],
)
def test_a_strategy_with_a_loop_of_its_own_compiles_once(lm, name):
    """Over many steps, in a second call, with other sampling parameters, limits and ends of text."""
    strategy = lm.resolve(name)
    for sampling, eos_token_ids in ((SAMPLINGS[0], ()), (SAMPLINGS[0], ()), (SAMPLINGS[1], ()), (SAMPLINGS[0], (12,))):
        assert count_compilations(lm, strategy, PROMPTS, NUM_STEPS + 1, sampling, eos_token_ids) == 2


@pytest.mark.slow
def test_other_shapes_are_other_programs(lm):
    """A batch of other rows, then longer prompts, which only prefill sees, then a longer cache, which both see."""
    strategy = lm.resolve("autoregressive")
    long = [prompt * 2 for prompt in PROMPTS]
    calls = ((PROMPTS, 8, 2), (PROMPTS, 8, 2), (PROMPTS[:2], 8, 4), (long, 8, 5), (PROMPTS, 200, 7), (PROMPTS, 8, 7))
    for prompts, limit, compilations in calls:
        assert count_compilations(lm, strategy, prompts, limit, SAMPLINGS[0]) == compilations
