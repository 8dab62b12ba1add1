"""Low-rank adapters for the linear layers of some of a decoder's blocks (LoRA; Hu et al., 2106.09685).

Two kinds: one for all rows, which is trained or belongs to a drafter, and many that are loaded, of which each row of a
batch has one of its own or none.

The first kind's tree is like a block's parameters, ``{"attention": {"query": {"adapter": {"down": [L, R, in], "up": [L,
out, R]}}}}`` and so on, stacked over the adapted layers. `jaxinfer.models.linear.Linear` applies one layer's adapters.

Loaded ones stand beside a model's parameters, under `LOADED`, in a tree like theirs: ``{"down": [N, R, in], "up":
[N, R, out]}`` for each linear layer that any of the N has a part in, and a stack of these where its kernel is one.
``"gain": [N, out]`` multiplies what the kernel alone gives (DoRA; Liu et al., 2402.09353), ``"shift": [N, out]`` is
added at last. A router has such a pair, and experts have ``"gate_down": [E, N, R, in]``, ``"gate_up": [E, N, R, out]``
and so on, of each kernel that any adapter has a part in. Of latent attention's heads (`OF_HEADS`) ``"up"`` has an axis
of heads first. A norm has ``"scale"`` and ``"bias"`` ``[N, D]``; what the
embedding and the output matrix have, `EMBED` and `HEAD`, says `jaxinfer.models.own_tables`. Which rows have which is
an array ``adapters_B`` int32: 0 is none, k the k-th. Ranks are filled up with zeros.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import DecoderConfig
from jaxinfer.notation import Array, Int, Params

# The name of an adapter among a linear layer's parameters.
ADAPTER = "adapter"
# The name of loaded ones among a model's parameters, and among those of a linear layer.
LOADED = "adapters"

# The names of the embedding's and the output matrix's among the loaded ones.
EMBED, HEAD = "embed", "head"

# The logical axes of every kernel ``[out, in]`` of a dense block.
ADAPTED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "attention.query": ("heads", "embed"),
        "attention.key": ("kv_heads", "embed"),
        "attention.value": ("kv_heads", "embed"),
        "attention.gate": ("heads", "embed"),
        "attention.output": ("embed", "heads"),
        "mlp.gate": ("ffn", "embed"),
        "mlp.up": ("ffn", "embed"),
        "mlp.down": ("embed", "ffn"),
    }
)
# Those of an expert that every token has beside the chosen ones.
_SHARED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "mlp.shared.gate": ("shared_ffn", "embed"),
        "mlp.shared.up": ("shared_ffn", "embed"),
        "mlp.shared.down": ("embed", "shared_ffn"),
    }
)
# Those of latent attention: what the compressed queries and rows are computed from, and by.
_OF_LATENTS: Mapping[str, tuple[str | None, str]] = MappingProxyType(
    {
        "attention.latent": (None, "embed"),
        "attention.key": (None, "embed"),
        "attention.query_latent": (None, "embed"),
        "attention.content": ("content_heads", "query_latent"),
        "attention.query": ("rotary_heads", "query_latent"),
        "attention.output": ("embed", "value_heads"),
        "attention.key_heads": ("content_heads", "latent"),
        "attention.value_heads": ("value_heads", "latent"),
    }
)
# Matrices that heads have, all heads' rows as one kernel ``[N * out, in]``.
OF_HEADS = ("attention.key_heads", "attention.value_heads")
# The names of all kernels that adapters may have a part in, in any block.
ADAPTED_NAMES = tuple(dict.fromkeys((*ADAPTED, *_SHARED, *_OF_LATENTS)))
_RANK_AXIS: Mapping[str, int] = MappingProxyType({"down": 0, "up": 1})


def kernel_axes(config: DecoderConfig) -> Mapping[str, tuple[str | None, str]]:
    """Return the logical axes of every linear layer's kernel ``[out, in]`` in any block, by its name.

    In a model of experts a block has some of them (`held_kernels`): what adapters have of routers and experts is no
    part of them (`jaxinfer.adapter_parts`).
    """
    latent, experts = config.latent, config.experts
    axes = {**ADAPTED, **_SHARED} if latent is None else {**ADAPTED, **_SHARED, **_OF_LATENTS}
    absent = {"mlp.gate", "mlp.shared.gate"} if not config.gated_mlp else set()
    absent |= {"attention.gate"} if not config.attention_gate else set()
    absent |= {name for name in ADAPTED if name.startswith("mlp.")} if all(config.sparse_layers) else set()
    absent |= set(_SHARED) if experts is None or not experts.shared_dim else set()
    if latent is not None:
        absent |= {"attention.value", *(() if latent.query_rank else ("attention.query_latent",))}
    return MappingProxyType({name: both for name, both in axes.items() if name not in absent})


def held_kernels(config: DecoderConfig, layer: int) -> frozenset[str]:
    """Return the names of the kernels of `kernel_axes` that a layer's block has."""
    is_sparse = config.sparse_layers[layer]
    return frozenset(
        name
        for name in kernel_axes(config)
        if not name.startswith("mlp.") or name.startswith("mlp.shared.") == is_sparse
    )


def parameter_of(name: str) -> str:
    """Return the name of the parameter that is a kernel of `kernel_axes`."""
    return f"{name}.{'weights' if name in OF_HEADS else 'kernel'}"


def kernel_shapes(config: DecoderConfig) -> Mapping[str, tuple[int, int]]:
    """Return the shape ``[out, in]`` of every kernel of `kernel_axes`, by its name."""
    if config.latent is not None:
        return _latent_shapes(config)
    sizes: dict[str | None, int] = {
        "embed": config.model_dim,
        "heads": config.num_heads * config.head_dim,
        "kv_heads": config.num_kv_heads * config.head_dim,
        **_feed_forward_sizes(config),
    }
    return MappingProxyType(
        {name: (sizes[out_axis], sizes[in_axis]) for name, (out_axis, in_axis) in kernel_axes(config).items()}
    )


def _feed_forward_sizes(config: DecoderConfig) -> dict[str, int]:
    return {"ffn": config.ffn_dim, "shared_ffn": config.experts.shared_dim if config.experts else 0}


def _latent_shapes(config: DecoderConfig) -> Mapping[str, tuple[int, int]]:
    latent, (rope,) = config.latent, {kind.rope for kind in config.kinds}
    assert latent is not None
    assert rope is not None
    outputs = {"attention.latent": latent.rank, "attention.key": rope.dim, "attention.query_latent": latent.query_rank}
    sizes = {
        "embed": config.model_dim,
        "latent": latent.rank,
        "query_latent": latent.query_rank or config.model_dim,
        "content_heads": config.num_heads * latent.content_dim,
        "rotary_heads": config.num_heads * rope.dim,
        "value_heads": config.num_heads * latent.value_dim,
        **_feed_forward_sizes(config),
    }
    return MappingProxyType(
        {
            name: (outputs.get(name) or sizes[out_axis or ""], sizes[in_axis])
            for name, (out_axis, in_axis) in kernel_axes(config).items()
        }
    )


def common_shapes(config: DecoderConfig) -> Mapping[str, tuple[int, int]]:
    """Return those of `kernel_shapes` that every block has."""
    held = [held_kernels(config, layer) for layer in range(config.num_layers)]
    return {name: shape for name, shape in kernel_shapes(config).items() if all(name in names for names in held)}


def adapter_shapes(config: DecoderConfig, num_layers: int, rank: int) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of every adapter parameter, by path, for the linear layers that all of a model's blocks have.

    They are stacked over ``num_layers`` blocks. Raises InvalidOption for latent attention.
    """
    if config.latent is not None:
        raise InvalidOption(f"adapters: the latent attention of {config.family} takes none in training: leave them out")
    shapes = {}
    for name, (outputs, inputs) in common_shapes(config).items():
        shapes[f"{name}.{ADAPTER}.down"] = (num_layers, rank, inputs)
        shapes[f"{name}.{ADAPTER}.up"] = (num_layers, outputs, rank)
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


def bound(params: Params) -> Params:
    """Return a model's parameters with its loaded adapters among those of the layers that they are for.

    Those of the embedding and of the output matrix, which may be one table, stay beside all.
    """
    if LOADED not in params:
        return params
    rest = {name: node for name, node in params.items() if name != LOADED}
    of_tables = {name: node for name, node in params[LOADED].items() if name in (EMBED, HEAD)}
    of_layers = {name: _beside(rest[name], node) for name, node in params[LOADED].items() if name not in of_tables}
    return {**rest, **of_layers, **({LOADED: of_tables} if of_tables else {})}


def _beside(node: Mapping[str, Any], loaded: Mapping[str, Any]) -> Params:
    if not any(isinstance(value, Mapping) for value in loaded.values()):
        return {**node, LOADED: loaded}
    return {name: _beside(value, loaded[name]) if name in loaded else value for name, value in node.items()}
