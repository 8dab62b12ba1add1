"""Real layers of experts, from one token to a chunk of a prompt: Mixtral 8x7B's and Qwen3-30B-A3B's."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.case import Case, Rival
from pallas_kernels.grouped_matmul.codes import FLOAT4, FLOAT8, INTEGER, LEVELS, LEVELS_OF_FOUR_BITS, Codes
from pallas_kernels.grouped_matmul.op import grouped_matmul, shape_key
from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference
from pallas_kernels.grouped_matmul.rivals import gate_and_up_by_megablox, one_by_megablox


class Layer(NamedTuple):
    """The experts of a layer, those of a token, and the widths of the model and of an expert."""

    experts: int
    per_token: int
    model_dim: int
    ffn_dim: int


MIXTRAL = Layer(8, 2, 4096, 14336)
QWEN3_30B = Layer(128, 8, 2048, 768)
_PLAIN, _CODED = (128, 256, 512, 768, 1024, 2048), (768, 1024, 2048, 4096)
_TILES = ((64, 1024, 1024), (64, 2048, 768), (128, 1024, 1024), (128, 2048, 768), (256, 2048, 1024))


def make_case(layer: Layer, tokens: int, rows: int, is_down: bool = False, kind: str | None = None) -> Case:
    """Return the case of gate and up, or of down, for tokens whose experts are drawn, in blocks of so many rows.

    ``kind`` are weights in few bits: ``int8``, ``int4/64`` with minima, ``e2m1/32``, ``levels/64``, ``int8/32``,
    ``e4m3/128``, or ``int4x8/32`` with minima whose units 8 groups share.
    """
    sizes_E = _drawn_sizes(layer, tokens)
    experts_X, count = lay_out(sizes_E, rows)
    width, channels = (layer.ffn_dim, layer.model_dim) if is_down else (layer.model_dim, layer.ffn_dim)
    kernels, out_item = (1, 4) if is_down else (2, 2)
    stack = _described(layer.experts, channels, width, kind)
    one_expert = sum(math.prod(part.shape[1:]) * _bits(part) // 8 for part in stack)
    pairs, read = int(sizes_E.sum()), int((sizes_E > 0).sum())
    tile = max(rows for rows, *_ in _TILES)
    sorted_rows = jax.ShapeDtypeStruct((-(-pairs // tile) * tile, width), jnp.bfloat16)
    rival = one_by_megablox if is_down else gate_and_up_by_megablox
    sizes = tuple(int(size) for size in sizes_E)
    return Case(
        kernel="grouped_matmul",
        name=f"E={layer.experts} C={layer.per_token} N={tokens} {width}x{channels}{'' if is_down else ' twice'}"
        + (f" {kind}" if kind else ""),
        function=partial(one_product if is_down else gate_and_up, kind=kind),
        arguments=(
            jax.ShapeDtypeStruct((len(experts_X) * rows, width), jnp.bfloat16),
            experts_X,
            count,
            *stack * kernels,
        ),
        blocks=tuple({"block_f": block_f} for block_f in (_CODED if kind else _PLAIN) if block_f <= channels),
        shape=shape_key(rows, width, channels, kernels, kind and kind.replace("x8", "")),
        mxu_flops=2 * pairs * width * channels * kernels,
        floor_bytes=read * kernels * one_expert + pairs * (width * 2 + channels * out_item),
        reference=partial(one_by_reference if is_down else gate_and_up_by_reference, kind=kind),
        rivals=()
        if kind
        else (
            Rival(
                "megablox",
                partial(rival, sizes=sizes),
                tuple({"tile_m": m, "tile_k": min(k, width), "tile_n": min(n, channels)} for m, k, n in _TILES),
                (sorted_rows, *stack * kernels),
            ),
        ),
    )


def lay_out(sizes_E: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the expert of each block of rows, and the number of blocks: all are run."""
    experts = np.repeat(np.arange(len(sizes_E)), -(-sizes_E // rows)).astype(np.int32)
    return experts, np.asarray(len(experts), np.int32)


def gated(gate: Any, up: Any) -> Any:
    """Return what Mixtral's and Qwen's down multiply."""
    return jax.nn.silu(gate) * up


def gate_and_up(x, experts, count, *parts, kind=None, **blocks):
    """Multiply by gate and up and bring both together."""
    gate_up = _kernels(parts, 2, kind)
    return grouped_matmul(x, gate_up, experts, count, combine=gated, out_dtype=jnp.bfloat16, **blocks)


def one_product(x, experts, count, *parts, kind=None, **blocks):
    """Multiply by down."""
    return grouped_matmul(x, _kernels(parts, 1, kind), experts, count, **blocks)


def gate_and_up_by_reference(x, experts, count, *parts, kind=None):
    """Do as `gate_and_up`."""
    gate_up = _kernels(parts, 2, kind)
    return grouped_matmul_reference(x, gate_up, experts, count, combine=gated, out_dtype=jnp.bfloat16)


def one_by_reference(x, experts, count, *parts, kind=None):
    """Do as `one_product`."""
    return grouped_matmul_reference(x, _kernels(parts, 1, kind), experts, count)


def _described(experts: int, channels: int, width: int, kind: str | None) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Describe a stack of kernels, in few bits or not."""
    if kind is None:
        return (jax.ShapeDtypeStruct((experts, channels, width), jnp.bfloat16),)
    name, _, group = kind.partition("/")
    if not group:
        codes = jax.ShapeDtypeStruct((experts, channels, width), jnp.int8)
        return codes, jax.ShapeDtypeStruct((experts, channels), jnp.float32)
    in_bytes = name in (FLOAT8, "int8")
    codes = jax.ShapeDtypeStruct((experts, width, channels), jnp.int8 if in_bytes else jnp.uint4)
    dtype = {FLOAT4: jnp.uint8, FLOAT8: jnp.float32, "int4x8": jnp.int8}.get(name, jnp.int16)
    scales = jax.ShapeDtypeStruct((experts, width // int(group), channels), dtype)
    if name == "int4x8":
        units = jax.ShapeDtypeStruct((experts, width // int(group) // 8, channels), jnp.int16)
        return codes, scales, scales, units, units
    return (codes, scales) if in_bytes or name in (FLOAT4, LEVELS) else (codes, scales, scales)


def _kernels(parts: Sequence[Any], count: int, kind: str | None) -> list[Any]:
    """Return kernels that have these parts."""
    if kind is None:
        return list(parts)
    each, what = len(parts) // count, kind.partition("/")[0]
    names = ("codes", "scales", "minima", "scale_units", "minima_units")
    levels = tuple(np.linspace(-1, 1, LEVELS_OF_FOUR_BITS).tolist()) if what == LEVELS else ()
    what = what if what in (FLOAT4, FLOAT8, LEVELS) and "/" in kind else INTEGER
    stacks = [dict(zip(names, parts[at : at + each])) for at in range(0, len(parts), each)]
    return [Codes(**stack, kind=what, levels=levels) for stack in stacks]


def _bits(part: jax.ShapeDtypeStruct) -> int:
    return jax.dtypes.itemsize_bits(part.dtype)


def _drawn_sizes(layer: Layer, tokens: int) -> np.ndarray:
    """Return how many tokens go to each expert if each goes to any with the same probability."""
    drawn = np.random.default_rng(tokens).random((tokens, layer.experts)).argsort(axis=1)[:, : layer.per_token]
    return np.bincount(drawn.reshape(-1), minlength=layer.experts)


# Experts without blocks, with one and with several; outputs that are cut; few rows and many.
_TOY = Layer(5, 2, 256, 384)
TOY_CASES = (
    make_case(_TOY, 20, 16),
    make_case(_TOY, 20, 16, True),
    make_case(_TOY, 20, 16, kind="int4/64"),
    make_case(_TOY, 20, 32, True, kind="int4/64"),
    make_case(_TOY, 20, 16, True, kind="int8"),
    make_case(_TOY, 20, 16, kind="e2m1/32"),
    make_case(_TOY, 20, 16, kind="e4m3/128"),
)

CASES = (
    *(
        make_case(layer, tokens, rows, is_down)
        for layer, sizes in ((MIXTRAL, {64: 16, 512: 128, 2048: 128}), (QWEN3_30B, {64: 8, 512: 32, 2048: 128}))
        for tokens, rows in sizes.items()
        for is_down in (False, True)
    ),
    *(
        make_case(layer, tokens, rows, is_down, kind)
        for kind, layer, tokens, rows in (
            ("int4/64", MIXTRAL, 16, 8),
            ("int4/64", MIXTRAL, 64, 32),
            ("int4/64", MIXTRAL, 512, 128),
            ("int4/64", MIXTRAL, 2048, 128),
            ("int4/64", QWEN3_30B, 16, 8),
            ("int4/64", QWEN3_30B, 64, 8),
            ("int4/64", QWEN3_30B, 512, 32),
            ("int4/64", QWEN3_30B, 2048, 128),
            ("int8", QWEN3_30B, 64, 8),
            ("e2m1/32", QWEN3_30B, 64, 8),
            ("e4m3/128", QWEN3_30B, 64, 8),
            ("int8/32", QWEN3_30B, 64, 8),
            ("levels/64", QWEN3_30B, 64, 8),
            ("int4x8/32", QWEN3_30B, 64, 8),
        )
        for is_down in (False, True)
    ),
)
