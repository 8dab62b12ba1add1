"""The chain against the logits processors of Hugging Face transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling import SamplingParams, transform_logits
from tests.sampling.rows import arrays_of, history_of

pytestmark = pytest.mark.parity
V = 1000
PROMPT, OUTPUT = [5, 6, 7, 7], [11, 12]


def warpers(name):
    pytest.importorskip("torch")
    from transformers.generation import logits_process as hf

    return {
        "temperature": [hf.TemperatureLogitsWarper(0.7)],
        "top_k": [hf.TopKLogitsWarper(50)],
        "top_p": [hf.TopPLogitsWarper(0.9)],
        "min_p": [hf.MinPLogitsWarper(0.05)],
        "repetition_penalty": [hf.RepetitionPenaltyLogitsProcessor(1.3)],
        "min_new_tokens": [hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), 3, [2])],
        "logit_bias": [hf.SequenceBiasLogitsProcessor([[[7], 2.5], [[900], -3.0]])],
        "chain": [hf.TemperatureLogitsWarper(0.7), hf.TopKLogitsWarper(200), hf.TopPLogitsWarper(0.9)],
    }[name]


OPTIONS = {
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.0, "top_k": 50},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "min_new_tokens": {"min_new_tokens": 3},
    "logit_bias": {"logit_bias": {7: 2.5, 900: -3.0}},
    "chain": {"temperature": 0.7, "top_k": 200, "top_p": 0.9},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_logits_equal_those_of_transformers(name):
    torch = pytest.importorskip("torch")
    logits = np.random.default_rng(2).normal(size=(4, V)).astype(np.float32) * 3
    logits[:, 100] = logits[:, 101]
    ids = torch.tensor([PROMPT + OUTPUT] * 4)
    expected = torch.from_numpy(logits.copy())
    for warper in warpers(name):
        expected = warper(ids, expected)
    history = history_of([PROMPT] * 4, [OUTPUT] * 4)
    arrays = arrays_of([SamplingParams(**OPTIONS[name])] * 4, V)
    result = jax.jit(transform_logits)(jnp.asarray(logits)[:, None], arrays, history, jnp.full((4, 1), 6))
    np.testing.assert_allclose(result[:, 0], expected.numpy(), rtol=1e-6)
