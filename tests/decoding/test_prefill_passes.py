"""A prompt that is padded to a power of two takes as many passes of prefill on a CPU as it has pieces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer.decoding.programs import FIXED_CHUNK, PREFILL_CHUNK, prefill_chunk
from jaxinfer.decoding.step import forward_prompt, num_passes
from jaxinfer.models.decoder import create_cache
from jaxinfer.models.model import Model
from jaxinfer.ops.backend import choose_backend

CHUNK = 16


@pytest.mark.parametrize(("lengths", "passes"), [((1, 1), 1), ((16, 3), 1), ((5, 17), 2), ((64, 2), 4)])
def test_passes_end_with_the_longest_prompt(tiny_llama_folder, lengths, passes):
    """What is behind them stays as it was, and what is before has the bits of a pass over all of it."""
    lm = jaxinfer.load(tiny_llama_folder())
    tokens_BT = jnp.asarray(np.random.default_rng(1).integers(2, 250, (2, 64)), jnp.int32)
    lengths_B = jnp.asarray(lengths, jnp.int32)

    def run(chunk):
        cache = create_cache(lm.config, 2, 64, lm.backend)
        model = Model(lm.programs.decoder, lm.params)
        return jax.jit(lambda: forward_prompt(model, tokens_BT, lengths_B, cache, chunk)[0])()

    whole_BTD, found_BTD = run(64), run(CHUNK)
    assert not np.any(found_BTD[:, passes * CHUNK :])
    for row, length in enumerate(lengths):
        np.testing.assert_array_equal(found_BTD[row, :length], whole_BTD[row, :length])
        assert np.all(np.any(found_BTD[row, :length], axis=-1))


def test_no_prompt_is_left_out_and_none_is_too_long():
    on_cpu, on_tpu = choose_backend("float32", "cpu"), choose_backend("bfloat16", "tpu")
    for lengths, passes in (((0, 0), 1), ((1, 0), 1), ((33, 5), 3), ((80, 1), 4)):
        assert num_passes(jnp.asarray(lengths), 64, CHUNK, on_cpu) == passes
        # A compiler that knows how many there are counts them.
        assert num_passes(jnp.asarray(lengths), 64, CHUNK, on_tpu) == 4


def test_long_prompts_are_cut_more_finely_where_padding_costs_what_tokens_do():
    on_cpu, by_xla = choose_backend("float32", "cpu"), choose_backend("float32", "cpu", scan_layers=True)
    assert prefill_chunk(on_cpu, PREFILL_CHUNK) == PREFILL_CHUNK
    assert prefill_chunk(on_cpu, 2 * PREFILL_CHUNK) == PREFILL_CHUNK // 4
    assert prefill_chunk(by_xla, 2 * PREFILL_CHUNK) == PREFILL_CHUNK
    assert prefill_chunk(choose_backend("bfloat16", "tpu", exact="bits"), 2 * PREFILL_CHUNK) == FIXED_CHUNK
