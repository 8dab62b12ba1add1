"""Tokens of steps, in the tables of published models that are tied: codes, scales and minima."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.case import Blocks, Case
from pallas_kernels.take_columns.op import column_bytes, take_columns, take_shape
from pallas_kernels.take_columns.reference import reference_columns

BLOCKS: tuple[Blocks, ...] = tuple({"rows": rows} for rows in (256, 512, 1024))


def take_case(name: str, width: int, group: int, vocabulary: int, tokens: int, codes: Any, others: Any) -> Case:
    """Describe tokens all over a table; ``others`` are the dtypes of scales and minima."""
    parts = (
        jax.ShapeDtypeStruct((width, vocabulary), codes),
        *(jax.ShapeDtypeStruct((width // group, vocabulary), each) for each in others),
    )
    columns = np.random.default_rng(0).integers(0, vocabulary, tokens, np.int32)
    columns[0] = vocabulary - 1
    return Case(
        "take_columns",
        f"{name} T={tokens}",
        taken,
        (columns, *parts),
        BLOCKS,
        take_shape(parts),
        mxu_flops=0,
        # A column cannot be read without the tiles that it lies in.
        floor_bytes=tokens * sum(map(column_bytes, parts)),
        reference=taken_by_reference,
    )


def taken(columns: Any, *parts: Any, **blocks: Any) -> Any:
    """Take columns, and join them as float32."""
    return _joined(take_columns(parts, columns, **blocks))


def taken_by_reference(columns: Any, *parts: Any) -> Any:
    """Do as `taken`."""
    return _joined(reference_columns(parts, columns))


def _joined(found: Any) -> Any:
    return jnp.concatenate([each.astype(jnp.float32) for each in found], axis=1)


TOY_CASES = (
    take_case("toy", 192, 64, 200, 5, jnp.int8, (jnp.int16,)),
    take_case("toy of four bits", 128, 32, 384, 3, jnp.uint4, (jnp.int16, jnp.float32)),
)

CASES = (
    take_case("smollm2-135m int8", 576, 64, 49152, 1, jnp.int8, (jnp.int16,)),
    take_case("llama-3.2-1b int8", 2048, 64, 128256, 8, jnp.int8, (jnp.int16,)),
    take_case("llama-3.2-1b int8", 2048, 64, 128256, 64, jnp.int8, (jnp.int16,)),
    take_case("gemma-2b int4", 2048, 64, 256000, 8, jnp.uint4, (jnp.int16, jnp.int16)),
)
