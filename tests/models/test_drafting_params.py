"""What only drafts lies in panels where the CPU multiplies such, and stays the same weights."""

from dataclasses import replace

import jax
import numpy as np

from jaxinfer.models.few_bits import change_matrices, drafting_params, in_few_bits
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.cpu_kernels.panels.products import multiplies_panels
from jaxinfer.ops.few_bits.formats import int4, nf4
from jaxinfer.ops.few_bits.panels import PanelArray
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray, is_quantized
from tests.toys import TINY_LLAMA, float32_backend, random_params

BACKEND = float32_backend()
FORM = int4(32, False)
CONFIG = replace(TINY_LLAMA, model_dim=64, ffn_dim=96)

# Other processors have nothing in panels.
KIND = PanelArray if BACKEND.cpu_kernels and multiplies_panels(FORM, 64) else QuantizedArray


def leaves_of(params):
    return jax.tree.leaves(params, is_leaf=is_quantized)


def dense(leaf):
    return np.asarray(leaf.dequantize() if is_quantized(leaf) else leaf)


def test_kernels_and_tables_of_a_model_in_few_bits_lie_in_panels():
    stored = in_few_bits(random_params(CONFIG, 0), FORM, "weights")
    panels, kinds = drafting_params(stored, BACKEND), []
    change_matrices(panels, lambda path, matrix: kinds.append(type(matrix)))
    assert set(kinds) == {KIND}
    for mine, own in zip(leaves_of(panels), leaves_of(stored), strict=True):
        np.testing.assert_array_equal(dense(mine), dense(own))
    # Once only.
    again = drafting_params(panels, BACKEND)
    assert all(one is other for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(panels), strict=True))


def test_what_has_no_panels_stays_as_it_is():
    params = random_params(CONFIG, 0)
    for stored, backend in (
        (params, BACKEND),
        (in_few_bits(params, FORM, "weights"), replace(BACKEND, cpu_kernels=False)),
        (in_few_bits(params, FORM, "weights"), choose_backend("bfloat16", "tpu")),
    ):
        leaves = jax.tree.leaves(drafting_params(stored, backend))
        assert all(one is other for one, other in zip(leaves, jax.tree.leaves(stored), strict=True))
        # And what was in panels elsewhere is so no longer.
        again = drafting_params(drafting_params(stored, BACKEND), backend)
        for one, other in zip(leaves_of(again), leaves_of(stored), strict=True):
            assert backend is BACKEND or type(one) is type(other)
            np.testing.assert_array_equal(dense(one), dense(other))
    kinds = []
    levels = drafting_params(in_few_bits(params, nf4(32), "weights"), BACKEND)
    change_matrices(levels, lambda path, matrix: kinds.append((path[0], type(matrix))))
    assert {kind for part, kind in kinds if part != "blocks"} == {KIND}
    assert PanelArray not in {kind for part, kind in kinds if part == "blocks"}
