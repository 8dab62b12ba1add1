"""Real layers of experts, from one token to a chunk of a prompt: Mixtral 8x7B's and Qwen3-30B-A3B's."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.case import Case, Rival
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
_TILES = ((64, 1024, 1024), (64, 2048, 768), (128, 1024, 1024), (128, 2048, 768), (256, 2048, 1024))


def make_case(layer: Layer, tokens: int, rows: int, is_down: bool = False) -> Case:
    """Return the case of gate and up, or of down, for tokens whose experts are drawn, in blocks of so many rows."""
    sizes_E = _drawn_sizes(layer, tokens)
    experts_X, count = lay_out(sizes_E, rows)
    width, channels = (layer.ffn_dim, layer.model_dim) if is_down else (layer.model_dim, layer.ffn_dim)
    kernels, item, out_item = (1, 2, 4) if is_down else (2, 2, 2)
    stack = jax.ShapeDtypeStruct((layer.experts, channels, width), jnp.bfloat16)
    pairs, read = int(sizes_E.sum()), int((sizes_E > 0).sum())
    tile = max(rows for rows, *_ in _TILES)
    sorted_rows = jax.ShapeDtypeStruct((-(-pairs // tile) * tile, width), jnp.bfloat16)
    rival = one_by_megablox if is_down else gate_and_up_by_megablox
    sizes = tuple(int(size) for size in sizes_E)
    return Case(
        kernel="grouped_matmul",
        name=f"E={layer.experts} C={layer.per_token} N={tokens} {width}x{channels}{'' if is_down else ' twice'}",
        function=one_product if is_down else gate_and_up,
        arguments=(
            jax.ShapeDtypeStruct((len(experts_X) * rows, width), jnp.bfloat16),
            experts_X,
            count,
            *[stack] * kernels,
        ),
        blocks=tuple({"block_f": block_f} for block_f in (128, 256, 512, 768, 1024, 2048) if block_f <= channels),
        shape=shape_key(rows, width, channels, kernels),
        mxu_flops=2 * pairs * width * channels * kernels,
        floor_bytes=read * kernels * width * channels * item + pairs * (width * item + channels * out_item),
        reference=one_by_reference if is_down else gate_and_up_by_reference,
        rivals=(
            Rival(
                "megablox",
                partial(rival, sizes=sizes),
                tuple({"tile_m": m, "tile_k": min(k, width), "tile_n": min(n, channels)} for m, k, n in _TILES),
                (sorted_rows, *[stack] * kernels),
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


def gate_and_up(x, experts, count, gate, up, **blocks):
    """Multiply by gate and up and bring both together."""
    return grouped_matmul(x, [gate, up], experts, count, combine=gated, out_dtype=jnp.bfloat16, **blocks)


def one_product(x, experts, count, down, **blocks):
    """Multiply by down."""
    return grouped_matmul(x, [down], experts, count, **blocks)


def gate_and_up_by_reference(x, experts, count, gate, up):
    """Do as `gate_and_up`."""
    return grouped_matmul_reference(x, [gate, up], experts, count, combine=gated, out_dtype=jnp.bfloat16)


def one_by_reference(x, experts, count, down):
    """Do as `one_product`."""
    return grouped_matmul_reference(x, [down], experts, count)


def _drawn_sizes(layer: Layer, tokens: int) -> np.ndarray:
    """Return how many tokens go to each expert if each goes to any with the same probability."""
    drawn = np.random.default_rng(tokens).random((tokens, layer.experts)).argsort(axis=1)[:, : layer.per_token]
    return np.bincount(drawn.reshape(-1), minlength=layer.experts)


# Experts without blocks, with one and with several; outputs that are cut.
TOY_CASES = (make_case(Layer(5, 2, 256, 384), 20, 16), make_case(Layer(5, 2, 256, 384), 20, 16, True))

CASES = tuple(
    make_case(layer, tokens, rows, is_down)
    for layer, sizes in ((MIXTRAL, {64: 16, 512: 128, 2048: 128}), (QWEN3_30B, {64: 16, 512: 32, 2048: 128}))
    for tokens, rows in sizes.items()
    for is_down in (False, True)
)
