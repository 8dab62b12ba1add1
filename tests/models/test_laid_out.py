"""Weights in few bits lie in panels where the CPU multiplies such, and stay the same weights."""

from dataclasses import replace

import jax
import numpy as np

from jaxinfer.models.few_bits import change_matrices, drafting_params, in_few_bits, laid_out
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.cpu_kernels.panels.products import drafts_by_panels, multiplies_panels
from jaxinfer.ops.few_bits.formats import int4, nf4
from jaxinfer.ops.few_bits.panels import PanelArray
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray, is_quantized
from jaxinfer.parallel.partitioner import partitioner_of
from tests.toys import TINY_LLAMA, float32_backend, random_params

BACKEND = float32_backend()
FORM = int4(32, False)
CONFIG = replace(TINY_LLAMA, model_dim=64, ffn_dim=96)

# Other processors have nothing in panels, or only what drafts.
KIND = PanelArray if BACKEND.cpu_kernels and drafts_by_panels(FORM, 64) else QuantizedArray
EXACT = PanelArray if BACKEND.cpu_kernels and multiplies_panels(FORM, 64) else QuantizedArray


def leaves_of(params):
    return jax.tree.leaves(params, is_leaf=is_quantized)


def dense(leaf):
    return np.asarray(leaf.dequantize() if is_quantized(leaf) else leaf)


def matrices(params):
    """Return each matrix's place and itself."""
    found = []
    change_matrices(params, lambda path, matrix: found.append((path[0], matrix)))
    return found


def test_kernels_in_groups_and_tables_lie_in_panels_and_draft_so_when_asked():
    for form in (FORM, nf4(32)):
        stored = in_few_bits(random_params(CONFIG, 0), form, "weights")
        panels = laid_out(stored, BACKEND)
        own_kind = PanelArray if BACKEND.cpu_kernels and multiplies_panels(form, 64) else QuantizedArray
        kinds = {(part == "blocks", type(matrix)) for part, matrix in matrices(panels)}
        assert kinds == {(True, own_kind), (False, EXACT)}
        for mine, own in zip(leaves_of(panels), leaves_of(stored), strict=True):
            np.testing.assert_array_equal(dense(mine), dense(own))
        again = laid_out(panels, BACKEND)
        assert all(one is other for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(panels), strict=True))
        # The same arrays draft, where they are integers.
        drafts = drafting_params(panels, BACKEND)
        assert all(
            one is other or part != "blocks"
            for (part, mine), (_, own) in zip(matrices(drafts), matrices(panels), strict=True)
            for one, other in zip(jax.tree.leaves(mine), jax.tree.leaves(own), strict=True)
        )
        assert {getattr(matrix, "drafts", False) for part, matrix in matrices(drafts) if part == "blocks"} == {
            form is FORM and KIND is PanelArray
        }


def test_kernels_and_tables_of_a_model_in_few_bits_lie_in_panels():
    stored = in_few_bits(random_params(CONFIG, 0), FORM, "weights")
    panels = drafting_params(stored, BACKEND)
    assert {type(matrix) for _, matrix in matrices(panels)} == {KIND}
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
        for lay_out in (drafting_params, laid_out):
            again = drafting_params(lay_out(stored, BACKEND), backend)
            for one, other in zip(leaves_of(again), leaves_of(stored), strict=True):
                assert backend is BACKEND or type(one) is type(other)
                np.testing.assert_array_equal(dense(one), dense(other))


def test_weights_in_panels_lie_by_rows_on_a_mesh():
    stored = in_few_bits(random_params(CONFIG, 0), FORM, "weights")
    placed = partitioner_of("data=1").place_params(CONFIG, BACKEND, laid_out(stored, BACKEND))
    for one, other in zip(leaves_of(placed), leaves_of(stored), strict=True):
        assert type(one) is type(other)
        np.testing.assert_array_equal(dense(one), dense(other))
