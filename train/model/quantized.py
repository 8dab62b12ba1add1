"""A frozen base in few bits, for training adapters on it (QLoRA, Dettmers et al., 2305.14314), quantized by qwix.

Each kernel of the blocks is stored in blocks of 64 numbers along its contracted axis, with one scale each. It becomes
an array only inside the layer that uses it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from jaxinfer.errors import InvalidOption
from jaxinfer.models.few_bits import check_no_experts
from jaxinfer.models.layers import BLOCKS, KERNEL, TRANSPOSED_KERNEL
from jaxinfer.notation import Params

Bits = Literal["nf4", "int4", "int8"]
BITS: tuple[Bits, ...] = get_args(Bits)
_BLOCK = 64
_NO_EXPERTS = "adapters are not trained on experts in few bits: leave it out"


@partial(jax.tree_util.register_dataclass, data_fields=["stored"], meta_fields=[])
@dataclass(frozen=True)
class QuantizedKernel:
    """A kernel, or a stack of kernels, in few bits; JAX converts it to an array when needed."""

    stored: Any  # a qwix.QArray

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel."""
        return self.stored.qvalue.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the kernel as an array."""
        return self.stored.scale.dtype

    def __jax_array__(self) -> jax.Array:
        """Return the kernel as used in computations."""
        return _qwix().dequantize(self.stored)


def _qwix() -> Any:
    # Imported here: trainers run without it unless the base is to be quantized.
    try:
        import qwix
    except ImportError:
        raise InvalidOption('--quantize needs qwix: pip install -e ".[train]"') from None
    return qwix


def quantize_base(params: Params, bits: Bits) -> Params:
    """Return parameters whose blocks' kernels are stored in few bits; the others are unchanged."""
    qwix = _qwix()

    def quantize(path: Any, leaf: Any) -> Any:
        name = path[-1].key
        check_no_experts(tuple(key.key for key in path), "--quantize", _NO_EXPERTS)
        if name not in (KERNEL, TRANSPOSED_KERNEL):
            return leaf
        contracted = leaf.ndim - (1 if name == KERNEL else 2)
        size = leaf.shape[contracted]
        others = [axis for axis in range(leaf.ndim) if axis != contracted]
        tiles = {contracted: _BLOCK if size % _BLOCK == 0 else size}
        return QuantizedKernel(qwix.quantize(jnp.asarray(leaf), bits, channelwise_axes=others, tiled_axes=tiles))

    return {**params, BLOCKS: jax.tree_util.tree_map_with_path(quantize, params[BLOCKS])}


def dequantized(params: Params) -> Params:
    """Return plain parameters: the values that a quantized base computes with."""
    is_quantized = lambda leaf: isinstance(leaf, QuantizedKernel)  # noqa: E731
    return jax.tree.map(lambda leaf: jnp.asarray(leaf) if is_quantized(leaf) else leaf, params, is_leaf=is_quantized)
