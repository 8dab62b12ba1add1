"""The drafters that come with the default model draft well, and change no token.

That they are found without being named is tested where the model is loaded anyway: `tests/models/test_golden.py`.
"""

import pytest

import jaxinfer
from tests.default_model import default_model_path

QUESTIONS = (
    "Tom has 12 apples and buys 7 more. How many has he now?",
    "Write a Python function that reverses a list.",
)
SAMPLINGS = (jaxinfer.SamplingParams(), jaxinfer.SamplingParams(temperature=0.7, top_p=0.9, seed=3))


pytestmark = pytest.mark.optimised


@pytest.fixture(scope="module")
def lm():
    # Programs of one layer in a loop are ready sooner than of thirty.
    return jaxinfer.load(default_model_path(), max_len=256, scan_layers=True)


@pytest.fixture(scope="module")
def prompts(lm):
    return [lm.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]


@pytest.fixture(scope="module")
def plain(lm, prompts):
    return lm.generate(prompts, max_new_tokens=32, sampling=SAMPLINGS)


@pytest.mark.parametrize(
    ("strategy", "pace"),
    [
        pytest.param("medusa", 1.4, marks=pytest.mark.slow),
        pytest.param("eagle", 1.4, marks=pytest.mark.slow),
        pytest.param("streams", 1.3, marks=pytest.mark.exhaustive),
        pytest.param("streams+prompt_lookup", 1.3, marks=pytest.mark.exhaustive),
    ],
)
def test_they_draft_well_and_change_no_token(lm, prompts, plain, strategy, pace):
    drafted = lm.generate(prompts, max_new_tokens=32, sampling=SAMPLINGS, strategy=strategy)
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert drafted[0].stats.tokens_per_step > pace
