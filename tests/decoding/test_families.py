"""Families whose blocks are put together in other ways keep every bit under a strategy, in a batch."""

import pytest

from jaxinfer import SamplingParams
from tests.decoding.covered_models import OTHER_CONFIGS, random_model, random_prompts

SAMPLINGS = [
    SamplingParams(ignore_eos=True, logprobs=True),
    SamplingParams(temperature=0.7, top_k=6, seed=3, ignore_eos=True, logprobs=True),
]

WIDE = ("granite",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in WIDE else pytest.mark.exhaustive) for name in OTHER_CONFIGS],
)
def test_prompt_lookup_writes_what_plain_decoding_of_each_row_alone_writes(name):
    lm = random_model(name)
    prompts = random_prompts()[:2]
    alone = [
        lm.generate([prompt], max_new_tokens=24, sampling=sampling)[0] for prompt, sampling in zip(prompts, SAMPLINGS)
    ]
    together = lm.generate(prompts, max_new_tokens=24, sampling=SAMPLINGS, strategy="prompt_lookup")
    assert [(one.tokens, one.logprobs) for one in together] == [(one.tokens, one.logprobs) for one in alone]
    assert all(len(one.tokens) == 24 for one in alone)
    assert sum(one.stats.accepted for one in together) > 0
