"""Takes a block's parameters out of a stack."""

from typing import Any

import jax

from jaxinfer.models.adapters import LOADED
from jaxinfer.models.layers import EXPERTS, KERNEL
from jaxinfer.notation import Array, Int, Params
from jaxinfer.ops.few_bits.columns import layer_of
from jaxinfer.ops.few_bits.quantized_array import is_quantized
from jaxinfer.ops.layer_view import LayerView

# The linear layers of a feed-forward layer of which steps may read parts.
_FEED_FORWARD, _READ_IN_PART = "mlp", ("up", "down")


def block_of(stacked: Params, layer: Int[Array, ""] | int, in_part: bool = False) -> Params:
    """Return the parameters of one of stacked blocks; experts and loaded adapters are read where they lie.

    ``in_part``: so are the kernels of the feed-forward layer of which steps read parts.
    """

    def taken(path: tuple[str, ...], value: Any) -> Any:
        *_, name = path
        is_read_in_part = in_part and len(path) == 3 and path[0] == _FEED_FORWARD and path[1] in _READ_IN_PART
        if name in (EXPERTS, LOADED) or (is_read_in_part and name == KERNEL):
            return jax.tree.map(lambda leaf: LayerView(leaf, layer), value, is_leaf=is_quantized)
        if isinstance(value, dict):
            return {key: taken((*path, key), each) for key, each in value.items()}
        return layer_of(value, layer)

    return {name: taken((name,), value) for name, value in stacked.items()}
