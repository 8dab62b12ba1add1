"""Takes a block's parameters out of a stack."""

from jaxinfer.models.layers import EXPERTS
from jaxinfer.notation import Array, Int, Params
from jaxinfer.ops.few_bits.columns import layer_of
from jaxinfer.ops.layer_view import LayerView


def block_of(stacked: Params, layer: Int[Array, ""] | int) -> Params:
    """Return the parameters of one of stacked blocks; experts are read where they lie."""
    mlp = stacked["mlp"]
    if EXPERTS not in mlp:
        return layer_of(stacked, layer)
    views = {name: LayerView(stack, layer) for name, stack in mlp[EXPERTS].items()}
    others = {name: value for name, value in mlp.items() if name != EXPERTS}
    block = layer_of({**stacked, "mlp": others}, layer)
    return {**block, "mlp": {**block["mlp"], EXPERTS: views}}
