"""Adapters of Llama-2-7B's layers: few and many in a batch, a step's rows and prompts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.case import Blocks, Case
from pallas_kernels.low_rank.op import LANES, add_up, project_down, shape_key
from pallas_kernels.low_rank.reference import reference_down, reference_up

# Smaller ones would read an adapter again for rows that are not side by side; a batch of fewer rows is one block.
BLOCKS: tuple[Blocks, ...] = tuple({"rows": rows} for rows in (64, 128, 256))
# The adapters that are loaded, and the second of two layers' in a stack.
NUMBER, LAYERS, FIRST = 32, 2, 32


def down_case(width: int, ranks: tuple[int, ...], ids_B: Any, tokens: int = 1, dtype: Any = jnp.bfloat16) -> Case:
    """Return the case of the first matrices of layers that read the same ``width`` inputs, for rows with these ids."""
    ids_B = np.asarray(ids_B, np.int32)
    num_rows, item, rank = len(ids_B) * tokens, jnp.dtype(dtype).itemsize, sum(ranks)
    stacks = [jax.ShapeDtypeStruct((LAYERS * NUMBER, each, width), dtype) for each in ranks]
    return Case(
        "low_rank",
        f"down {_named(ids_B, tokens)} {width}x{'+'.join(map(str, ranks))}",
        down,
        (jax.ShapeDtypeStruct((len(ids_B), tokens, width), dtype), ids_B, *stacks),
        BLOCKS,
        shape_key(len(ids_B), tokens, width, rank),
        mxu_flops=2 * tokens * int((ids_B >= 0).sum()) * width * rank,
        floor_bytes=_read(ids_B) * width * rank * item + num_rows * (width * item + 4 * rank),
        reference=down_by_reference,
    )


def up_case(rank: int, outputs: int, ids_B: Any, tokens: int = 1, dtype: Any = jnp.bfloat16) -> Case:
    """Return the case of the second matrices of a layer with so many outputs."""
    ids_B = np.asarray(ids_B, np.int32)
    num_rows, item = len(ids_B) * tokens, jnp.dtype(dtype).itemsize
    return Case(
        "low_rank",
        f"up {_named(ids_B, tokens)} {rank}x{outputs}",
        up,
        (
            jax.ShapeDtypeStruct((len(ids_B), tokens, outputs), dtype),
            jax.ShapeDtypeStruct((len(ids_B), tokens, rank), dtype),
            ids_B,
            jax.ShapeDtypeStruct((LAYERS * NUMBER, rank, outputs), dtype),
        ),
        BLOCKS,
        shape_key(len(ids_B), tokens, LANES, rank),
        mxu_flops=2 * tokens * int((ids_B >= 0).sum()) * outputs * rank,
        floor_bytes=_read(ids_B) * outputs * rank * item + num_rows * (2 * outputs * item + rank * item),
        reference=up_by_reference,
        donated=(0,),
    )


def down(x: Any, ids: Any, *stacks: Any, **blocks: Any) -> Any:
    """Multiply by the first matrices, side by side; rows without an adapter get zeros."""
    found = project_down(x, stacks, ids, number=NUMBER, first=FIRST, **blocks)
    return jnp.where(ids[:, None, None] < 0, 0, jnp.concatenate(found, axis=2))


def up(base: Any, inner: Any, ids: Any, stack: Any, **blocks: Any) -> Any:
    """Multiply by the second matrices and add."""
    return add_up(base, inner, stack, ids, number=NUMBER, first=FIRST, **blocks)


def down_by_reference(x: Any, ids: Any, *stacks: Any) -> Any:
    """Do as `down`."""
    return jnp.concatenate(reference_down(x, stacks, ids, first=FIRST), axis=2)


def up_by_reference(base: Any, inner: Any, ids: Any, stack: Any) -> Any:
    """Do as `up`."""
    return reference_up(base, inner, stack, ids, first=FIRST)


def _read(ids_B: Any) -> int:
    return len({int(each) for each in ids_B if each >= 0})


def _named(ids_B: Any, tokens: int) -> str:
    return f"B={len(ids_B)} T={tokens} {_read(ids_B)} of {NUMBER} adapters"


# Of four rows two have the same, and one has none.
_FEW, _ALL = (17, 3, -1, 17), tuple(range(NUMBER))
TOY_CASES = (
    down_case(256, (8, 16), _FEW, 7),
    up_case(8, 384, _FEW, 7),
    up_case(16, 200, (5, 30), 1),
)

CASES = (
    *(down_case(4096, (16, 16, 16), ids) for ids in ((17, 3, 9, 30), _ALL)),
    down_case(11008, (16,), _ALL),
    *(up_case(16, 4096, ids) for ids in ((17, 3, 9, 30), _ALL)),
    up_case(16, 11008, _ALL),
    down_case(4096, (16, 16, 16), (17, 3, 9, 30), 512),
    up_case(16, 4096, (17, 3, 9, 30), 512),
    down_case(4096, (64, 64, 64), _ALL, 16),
)
