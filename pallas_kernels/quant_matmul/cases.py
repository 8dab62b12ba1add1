"""Real products of Llama-2-7B and Llama-3-8B, from one row to a chunk of a prompt."""

import jax
import jax.numpy as jnp

from pallas_kernels.case import Case, Rival
from pallas_kernels.quant_matmul.op import fit_block, quant_matmul, shape_key
from pallas_kernels.quant_matmul.reference import quant_matmul_reference

# Model width and channels: of the feed-forward's up and down, and of the attention's projections.
LLAMA_2_7B_UP = (4096, 11008)
LLAMA_2_7B_DOWN = (11008, 4096)
LLAMA_3_8B_UP = (4096, 14336)
LLAMA_3_8B_DOWN = (14336, 4096)
LLAMA_3_8B_QUERY = (4096, 4096)
LLAMA_3_8B_KEYS = (4096, 1024)


def make_case(rows: int, size: tuple[int, int], group: int = 0, activations: str = "bfloat16") -> Case:
    """Return the case of ``rows`` rows with int8 weights, or with int4 weights in groups of ``group`` rows."""
    model_dim, channels = size
    weight_bytes = model_dim * channels * (4 if group else 8) // 8
    scale_rows = model_dim // group if group else 1
    item_bytes = jnp.dtype(activations).itemsize
    arguments = (
        jax.ShapeDtypeStruct((rows, model_dim), jnp.dtype(activations)),
        jax.ShapeDtypeStruct((model_dim, channels), jnp.int4 if group else jnp.int8),
        jax.ShapeDtypeStruct((scale_rows, channels) if group else (channels,), jnp.float32),
    )
    if activations == "int8":
        arguments += (jax.ShapeDtypeStruct((rows,), jnp.float32),)
    weights = f"int4/{group}" if group else "int8"
    return Case(
        kernel="quant_matmul",
        name=f"M={rows} {model_dim}x{channels} {activations} x {weights}",
        function=_int8_product if activations == "int8" else quant_matmul,
        arguments=arguments,
        blocks=_blocks(model_dim, group),
        shape=shape_key(rows, model_dim, channels, group),
        mxu_flops=2 * rows * model_dim * channels,
        floor_bytes=weight_bytes + 4 * scale_rows * channels + rows * (item_bytes * model_dim + 2 * channels),
        int8=activations == "int8" and not group,
        rivals=(Rival("XLA", _product_of_xla, ({},)),),
        reference=_reference,
    )


def _blocks(model_dim: int, group: int) -> tuple[dict[str, int], ...]:
    """Return the blocks to try: of 256 thousand to four million weights."""
    sizes = dict.fromkeys(fit_block(model_dim, most, group) for most in (model_dim, 8192, 4096, 2048, 1024, 512))
    found = [{"block_k": block_k, "block_f": block_f} for block_k in sizes for block_f in (128, 256, 512, 1024)]
    return tuple(blocks for blocks in found if 1 << 18 <= blocks["block_k"] * blocks["block_f"] <= 4 << 20)


def _int8_product(x, weights, scales, activation_scales_M, **blocks):
    return quant_matmul(x, weights, scales, activation_scales_M=activation_scales_M, **blocks)


def _reference(x, weights, scales, activation_scales_M=None):
    return quant_matmul_reference(x, weights, scales, activation_scales_M=activation_scales_M)


def _product_of_xla(x, weights, scales, activation_scales_M=None):
    """Multiply as plain JAX would: scales of channels apply to the product, those of groups to the weights."""
    if scales.ndim == 1:
        kind = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
        out = jnp.dot(x, weights if x.dtype == jnp.int8 else weights.astype(x.dtype), preferred_element_type=kind)
        out = out.astype(jnp.float32) * scales
    else:
        widened = weights.astype(jnp.float32).reshape(scales.shape[0], -1, scales.shape[1]) * scales[:, None]
        widened = widened.astype(jnp.bfloat16).reshape(weights.shape)
        out = jnp.dot(x.astype(jnp.bfloat16), widened, preferred_element_type=jnp.float32)
    if activation_scales_M is not None:
        out *= activation_scales_M[:, None]
    return out.astype(jnp.bfloat16)


TOY_CASES = (make_case(5, (256, 384), activations="int8"), make_case(3, (512, 256), 64))

CASES = (
    *(make_case(rows, LLAMA_2_7B_UP) for rows in (1, 8, 16, 64, 512)),
    *(make_case(rows, LLAMA_2_7B_DOWN) for rows in (16, 512)),
    make_case(8, LLAMA_3_8B_UP),
    *(make_case(rows, LLAMA_2_7B_UP, activations="int8") for rows in (16, 512)),
    *(make_case(rows, LLAMA_2_7B_UP, 128) for rows in (1, 8, 16, 64, 512)),
    make_case(16, LLAMA_2_7B_DOWN, 128),
    make_case(16, LLAMA_2_7B_UP, 128, activations="int8"),
    *(make_case(rows, LLAMA_2_7B_UP, group) for group in (64, 32) for rows in (1, 16)),
    make_case(8, LLAMA_2_7B_DOWN, 64),
    make_case(8, LLAMA_3_8B_UP, 64),
    make_case(8, LLAMA_3_8B_DOWN, 64),
    make_case(8, LLAMA_3_8B_QUERY, 64),
    make_case(8, LLAMA_3_8B_KEYS, 64),
)
