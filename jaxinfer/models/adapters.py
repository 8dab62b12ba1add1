"""Low-rank adapters for the linear layers of some of a decoder's blocks (LoRA; Hu et al., 2106.09685).

The tree is like a block's parameters, ``{"attention": {"query": {"adapter": {"down": [L, R, in], "up": [L, out,
R]}}}}`` and so on, stacked over the adapted layers. `jaxinfer.models.linear.Linear` applies one layer's adapters.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.models.config import DecoderConfig
from jaxinfer.notation import Array, Int, Params

# The name of an adapter among a linear layer's parameters.
ADAPTER = "adapter"

# The logical axes of every kernel ``[out, in]`` of a block.
ADAPTED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "attention.query": ("heads", "embed"),
        "attention.key": ("kv_heads", "embed"),
        "attention.value": ("kv_heads", "embed"),
        "attention.output": ("embed", "heads"),
        "mlp.gate": ("ffn", "embed"),
        "mlp.up": ("ffn", "embed"),
        "mlp.down": ("embed", "ffn"),
    }
)
_RANK_AXIS: Mapping[str, int] = MappingProxyType({"down": 0, "up": 1})


def adapter_shapes(config: DecoderConfig, num_layers: int, rank: int) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of every adapter parameter, by path, for all linear layers of ``num_layers`` blocks."""
    sizes = {
        "embed": config.model_dim,
        "heads": config.num_heads * config.head_dim,
        "kv_heads": config.num_kv_heads * config.head_dim,
        "ffn": config.ffn_dim,
    }
    shapes = {}
    for name, (out_axis, in_axis) in ADAPTED.items():
        if name == "mlp.gate" and not config.gated_mlp:
            continue
        shapes[f"{name}.{ADAPTER}.down"] = (num_layers, rank, sizes[in_axis])
        shapes[f"{name}.{ADAPTER}.up"] = (num_layers, sizes[out_axis], rank)
    return MappingProxyType(shapes)


def adapted(block: Params, adapters: Params | None, index: Int[Array, ""] | int) -> Params:
    """Return one block's parameters with the adapters at ``index`` of their stack.

    If a linear layer already has an adapter, the two are joined into one that adds both outputs.
    """
    return block if adapters is None else _joined(block, jax.tree.map(lambda leaf: leaf[index], adapters))


def _joined(one: Mapping[str, Any], other: Mapping[str, Any]) -> Params:
    joined = dict(one)
    for name, node in other.items():
        if name not in one:
            joined[name] = node
        elif name == ADAPTER:
            joined[name] = {
                part: jnp.concatenate([one[name][part], node[part]], axis=axis) for part, axis in _RANK_AXIS.items()
            }
        else:
            joined[name] = _joined(one[name], node)
    return joined
