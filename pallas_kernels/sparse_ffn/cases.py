"""Real feed-forward layers with ReLU at several shares of live blocks: OPT-6.7B's, and a Llama-2-7B-like one's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.case import Case
from pallas_kernels.sparse_ffn.blocks import UNITS, LiveBlocks, count_blocks
from pallas_kernels.sparse_ffn.op import live_inputs, live_outputs, shape_key
from pallas_kernels.sparse_ffn.reference import live_inputs_reference, live_outputs_reference

_LAYERS = 2


def make_case(
    rows: int, model_dim: int, units: int, share: float, is_up: bool = False, dtype: Any = jnp.bfloat16
) -> Case:
    """Return the case of one product of a layer, of whose blocks a ``share`` is live; ``is_up``: gated up, not down."""
    item, num_blocks = jnp.dtype(dtype).itemsize, count_blocks(units)
    live = np.sort(np.random.default_rng(0).permutation(num_blocks)[: round(share * num_blocks)]).astype(np.int32)
    index = np.zeros(num_blocks, np.int32)
    index[: len(live)] = live
    read = sum(min(UNITS, units - int(block) * UNITS) for block in live)
    of_rows = (model_dim * item + 4 * units) if is_up else (read * item + 4 * model_dim)
    kernel = (_LAYERS, units, model_dim) if is_up else (_LAYERS, model_dim, units)
    return Case(
        kernel="sparse_ffn",
        name=f"{'up' if is_up else 'down'} M={rows} {model_dim}x{units} {share:.0%} live {jnp.dtype(dtype).name}",
        function=by_outputs if is_up else by_inputs,
        arguments=(
            jax.ShapeDtypeStruct((rows, model_dim if is_up else units), dtype),
            jax.ShapeDtypeStruct(kernel, dtype),
            index,
            np.asarray(len(live), np.int32),
        ),
        blocks=tuple({"together": together} for together in (1, 2, 4, 8)),
        shape=shape_key(rows, model_dim, units, dtype),
        mxu_flops=2 * rows * model_dim * read,
        floor_bytes=read * model_dim * item + rows * of_rows,
        reference=outputs_by_reference if is_up else inputs_by_reference,
    )


def by_inputs(hidden: Any, stack: Any, index: Any, count: Any, **blocks: Any) -> Any:
    """Multiply by down, of the second layer."""
    return live_inputs(hidden, stack, LiveBlocks(jnp.asarray(index), jnp.asarray(count)), layer=1, **blocks)


def by_outputs(x: Any, stack: Any, index: Any, count: Any, **blocks: Any) -> Any:
    """Multiply by up, of the second layer."""
    return live_outputs(x, stack, LiveBlocks(jnp.asarray(index), jnp.asarray(count)), layer=1, **blocks)


def inputs_by_reference(hidden: Any, stack: Any, index: Any, count: Any) -> Any:
    """Do as `by_inputs`."""
    return live_inputs_reference(hidden, stack, LiveBlocks(jnp.asarray(index), jnp.asarray(count)), layer=1)


def outputs_by_reference(x: Any, stack: Any, index: Any, count: Any) -> Any:
    """Do as `by_outputs`."""
    return live_outputs_reference(x, stack, LiveBlocks(jnp.asarray(index), jnp.asarray(count)), layer=1)


# Few live blocks and a last block that is cut.
TOY_CASES = (
    make_case(3, 256, 600, 0.6),
    make_case(3, 256, 600, 0.6, is_up=True),
    make_case(17, 128, 640, 1.0, dtype=jnp.float32),
)

CASES = (
    *(make_case(16, 4096, 16384, share) for share in (0.1, 0.25, 0.5)),
    *(make_case(16, 4096, 11008, share, is_up) for share in (0.25, 1.0) for is_up in (True, False)),
    make_case(64, 4096, 11008, 0.5),
    make_case(16, 576, 1536, 0.5),
    make_case(16, 2048, 8192, 0.25),
    make_case(16, 4096, 16384, 0.25, dtype=jnp.float32),
)
