"""On a GPU the programs are XLA's own: they lower for one, and call no kernel of ours."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.decoding.programs import decode, prefill
from jaxinfer.decoding.registry import parse_strategy
from jaxinfer.decoding.state import initial_state
from jaxinfer.decoding.strategy import Prefilled
from jaxinfer.models.decoder import Decoder, abstract_params, create_cache
from jaxinfer.models.model import Model
from jaxinfer.ops.backend import choose_backend
from jaxinfer.sampling.arrays import sampling_arrays
from jaxinfer.sampling.params import SamplingParams
from tests.toys import TINY_LLAMA

BATCH, SLOTS, TOKENS = 2, 128, 8
# XLA's own: sharding notes, and what it expands into its own code.
_XLA_CALLS = ("Sharding", "xla.", "mhlo.", "__gpu$", "cu_threefry2x32")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("autoregressive", marks=pytest.mark.exhaustive),
        pytest.param("prompt_lookup:min_ngram=1", marks=pytest.mark.exhaustive),
        "lookahead",
    ],
)
def test_prefill_and_decode_lower_for_a_gpu_without_our_kernels(name: str) -> None:
    backend = choose_backend("bfloat16", platform="gpu")
    assert (backend.kernels, backend.cpu_kernels) == ("xla", False)
    decoder, strategy = Decoder(TINY_LLAMA, backend), parse_strategy(name)
    params = abstract_params(TINY_LLAMA, backend)

    def build():
        cache = create_cache(TINY_LLAMA, BATCH, SLOTS, backend, strategy.headroom)
        sampling = sampling_arrays(
            [SamplingParams(temperature=1.0, top_p=0.9)] * BATCH, [0] * BATCH, (), TINY_LLAMA.num_tokens
        )
        return initial_state([[0]] * BATCH, [1] * BATCH, SLOTS, strategy.max_depth, cache, sampling)

    state = jax.eval_shape(build)
    hidden_BD = jax.ShapeDtypeStruct((BATCH, TINY_LLAMA.model_dim), jnp.bfloat16)

    def start(params, state, hidden_BD):
        return strategy.start(Model(decoder, params), (), state, Prefilled(hidden_BD, TOKENS))

    memory = jax.eval_shape(start, params, state, hidden_BD)
    max_steps = jax.ShapeDtypeStruct((), jnp.int32)
    for function, arguments in (
        (partial(prefill, decoder, strategy, TOKENS), (params, (), state)),
        (partial(decode, decoder, strategy), (params, (), state, memory, max_steps)),
    ):
        text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
        called = {line.split("custom_call @")[1].split("(")[0] for line in text.splitlines() if "custom_call @" in line}
        assert all(any(known in one for known in _XLA_CALLS) for one in called), called
        assert "while" in text
