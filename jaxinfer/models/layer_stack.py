"""Takes a block's parameters out of a stack."""

from typing import Any

from jaxinfer.models.layers import EXPERTS, KERNEL
from jaxinfer.notation import Array, Int, Params
from jaxinfer.ops.few_bits.columns import layer_of
from jaxinfer.ops.layer_view import LayerView

# The linear layers of a feed-forward layer of which steps may read parts.
_READ_IN_PART = ("up", "down")


def block_of(stacked: Params, layer: Int[Array, ""] | int, in_part: bool = False) -> Params:
    """Return the parameters of one of stacked blocks; experts are read where they lie.

    ``in_part``: so are the kernels of the feed-forward layer of which steps read parts.
    """
    mlp = stacked["mlp"]
    if EXPERTS not in mlp:
        block = layer_of(stacked, layer)
        return _with_views(block, mlp, layer) if in_part else block
    views = {name: LayerView(stack, layer) for name, stack in mlp[EXPERTS].items()}
    others = {name: value for name, value in mlp.items() if name != EXPERTS}
    block = layer_of({**stacked, "mlp": others}, layer)
    return {**block, "mlp": {**block["mlp"], EXPERTS: views}}


def _with_views(block: Params, mlp: Params, layer: Any) -> Params:
    """Return a block whose partly read kernels are those of the stack."""
    views = {
        name: {**block["mlp"][name], KERNEL: LayerView(mlp[name][KERNEL], layer)}
        for name in _READ_IN_PART
        if name in mlp
    }
    return {**block, "mlp": {**block["mlp"], **views}}
