"""A value head: what a text will be worth, told from the model's final hidden state at its last token.

It is an MLP, ``value = w SiLU(U h + b) + c``, with parameters ``{"inner": {"kernel", "bias"}, "out": {"kernel",
"bias"}}``; kernels are ``[out, in]``. A verifier of every token of a text is trained so by Cobbe et al. (2110.14168).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Float, Params
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.matmul import linear


def value_head_shapes(model_dim: int, inner: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of a head's parameters."""
    return {
        "inner": {"kernel": (inner, model_dim), "bias": (inner,)},
        "out": {"kernel": (1, inner), "bias": (1,)},
    }


def init_value_head(model_dim: int, inner: int, key: jax.Array) -> Params:
    """Draw a head in float32 whose value is zero everywhere."""
    shapes = value_head_shapes(model_dim, inner)
    head = {part: {name: jnp.zeros(shape, jnp.float32) for name, shape in own.items()} for part, own in shapes.items()}
    head["inner"]["kernel"] = jax.random.normal(key, (inner, model_dim), jnp.float32) * model_dim**-0.5
    return head


def head_values(head: Mapping[str, Any], hidden: Float[Array, "*rows D"], backend: Backend) -> Float[Array, "*rows"]:
    """Return what texts are worth by their last hidden states, in float32: scores may differ little around a mean."""
    backend = replace(backend, param_dtype="float32", compute_dtype="float32")
    inner = jax.nn.silu(linear(hidden, head["inner"]["kernel"], head["inner"]["bias"], backend))
    return linear(inner, head["out"]["kernel"], head["out"]["bias"], backend)[..., 0]
