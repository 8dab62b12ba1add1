"""EAGLE: one decoder layer that drafts from the target's features (2401.15077, 2406.16858, 2503.01840).

A drafter's place s stands for the token at s. It reads what the target computed there, f_s, and the token after it, and
predicts the token after that one. Where the target has computed nothing yet, it reads its own output of the place
before, g. With e the embedding of the token at s + 1, the two forms are

    EAGLE-3:    g = fc [f_l; f_m; f_h];  x = [norm e; norm g];  y = g + attention x;  out = y + mlp(norm y)
    EAGLE-1/2:  h = fc [e; f] + b;       x = h;                 y = h + attention x;  out = y + mlp(norm y)

In EAGLE-3 f are the target's hidden states before three of its layers, own outputs take the place of g, and logits are
``U norm(out)``, over a draft vocabulary if there is one. In EAGLE-1 f is the target's final normed hidden state, which
out predicts: own outputs take the place of f, and logits are the target's.

Parameters are ``"fc"``, ``"attention"`` and ``"mlp"`` as a block has them, ``"mlp_norm"`` and, in EAGLE-3,
``"embedding_norm"``, ``"feature_norm"``, ``"final_norm"``, ``"output"`` (without it, the target's matrix is read) and
``"ids"``, the token ids of the output's rows. ``"embedding"`` is a table of the drafter's own, ``"before_fc"`` a tuple
of norms (`EagleShape.feature_norms`).
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.cache.dense import DenseCache
from jaxinfer.cache.interface import Placement
from jaxinfer.models.block import Attention
from jaxinfer.models.config import DecoderConfig, LayerKind, Rope
from jaxinfer.models.drafters.heads import head_logits
from jaxinfer.models.layers import stored_kernel
from jaxinfer.models.mlp import MLP
from jaxinfer.models.model import Model
from jaxinfer.models.norm import Norm
from jaxinfer.models.step import build_step
from jaxinfer.notation import Array, Bool, Float, Int, Params
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cache_attention import Seen
from jaxinfer.ops.embedding import embed
from jaxinfer.ops.matmul import linear
from jaxinfer.ops.rows_in_bytes import holds_bytes


@dataclass(frozen=True)
class EagleShape:
    """What a drafter is, but for its weights.

    ``config`` describes its layer as a decoder of one, ``layers`` the target's whose inputs are its features
    (`jaxinfer.cache.features`), ``target_dim`` their width. ``fuses`` tells EAGLE-3 from EAGLE-1 and 2.
    ``norm_before_residual`` says that what attention adds to is the normed g. ``feature_norms`` are those before fc
    (EAGLE-3.1, 2605.09992): of ``each`` layer's features, or one of ``all``. With ``norm_output`` out is normed before
    it is handed on.
    """

    config: DecoderConfig
    layers: tuple[int, ...]
    target_dim: int
    fuses: bool = True
    norm_before_residual: bool = False
    feature_norms: Literal["", "each", "all"] = ""
    norm_output: bool = False

    @property
    def feature_norm_widths(self) -> tuple[int, ...]:
        """How many channels each norm before ``fc`` has."""
        return {"": (), "each": (self.target_dim,) * len(self.layers), "all": (self.fc_width,)}[self.feature_norms]

    @property
    def fc_width(self) -> int:
        """How many channels ``fc`` reads."""
        return len(self.layers) * self.target_dim if self.fuses else self.config.model_dim + self.target_dim


def default_features(num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs EAGLE-3 reads of a target: a low, a middle and a high one."""
    if num_layers >= 7:
        return 2, num_layers // 2, num_layers - 3
    return tuple(sorted({0, num_layers // 2, num_layers}))


def drafter_backend(backend: Backend) -> Backend:
    """Return how the layer runs beside a target: by XLA, and on a mesh whole on every device.

    A draft tree's nodes stand in its cache level by level, so that they see other slots than kernels know of.
    """
    alone = backend.mesh is None
    return replace(
        backend,
        cache_dtype=backend.param_dtype if holds_bytes(backend.cache_dtype) else backend.cache_dtype,
        scan_layers=True,
        kernels="xla",
        mesh=None,
        kv_shards=1,
        stages=1,
        step_rows=1,
        cpu_kernels=backend.cpu_kernels and alone,
        split_activations=None,
        remat_layers=False,
        collectives=None,
        activations=None,
        sparsity=None,
    )


def shape_for(target: DecoderConfig, fuses: bool = True) -> EagleShape:
    """Return the shape of a drafter for a target: a layer of its widths, heads and positions, as published ones are."""
    rope = next((kind.rope for kind in target.kinds if kind.rope is not None), None)
    theta = 10000.0 if rope is None else rope.theta
    num_kv_heads, head_dim = target.own_heads
    head_dim += head_dim % 2
    config = DecoderConfig(
        family="llama",
        vocab_size=target.vocab_size,
        num_layers=1,
        model_dim=target.model_dim,
        ffn_dim=target.ffn_dim,
        num_heads=target.num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=target.max_position,
        norm_eps=target.norm_eps,
        layer_pattern=(LayerKind(Rope(theta, head_dim)),),
    )
    layers = default_features(target.num_layers) if fuses else (target.num_layers,)
    return EagleShape(config, layers, target.model_dim, fuses)


class EagleCache(NamedTuple):
    """The layer's keys and values, ``[B, S, K*H]``; slot s of a row is the place s, nodes stand past the last one."""

    keys: Any
    values: Any


def create_eagle_cache(shape: EagleShape, batch: int, num_slots: int, backend: Backend) -> EagleCache:
    """Return an empty cache for texts and nodes of up to ``num_slots`` together."""
    backend, config = drafter_backend(backend), shape.config
    sizes = batch, num_slots, backend.cache_lanes(config.num_kv_heads, config.head_dim)
    return EagleCache(jnp.zeros(sizes, backend.cache_dtype), jnp.zeros(sizes, backend.cache_dtype))


def next_embeddings(model: Model, params: Params, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T E"]:
    """Return the drafter's embeddings of tokens: the target's rows as they are stored, or its own."""
    config, backend = model.config, model.decoder.backend
    if "embedding" in params:
        return embed(params["embedding"], tokens_BT, drafter_backend(backend))
    embedded_BTE = embed(model.params["embed"]["embedding"], tokens_BT, backend)
    if config.embedding_dim is not None:
        embedded_BTE = linear(embedded_BTE, stored_kernel(model.params["project_in"]), None, backend)
    return embedded_BTE.astype(backend.compute_dtype)


def fused(shape: EagleShape, params: Params, features_BTF: Float[Array, "B T F"], backend: Backend) -> Array:
    """Return what stands for the target's features in the place of the layer's own outputs."""
    if not shape.fuses:
        return features_BTF
    if shape.feature_norms:
        dtype, widths = features_BTF.dtype, shape.feature_norm_widths
        parts = jnp.split(features_BTF, len(widths), axis=-1)
        norms = (Norm(replace(shape.config, model_dim=width), drafter_backend(backend)) for width in widths)
        parts = [_applied(*each) for each in zip(norms, params["before_fc"], parts)]
        features_BTF = jnp.concatenate(parts, axis=-1).astype(dtype)
    return linear(features_BTF, params["fc"]["kernel"], params["fc"].get("bias"), drafter_backend(backend))


def run_layer(
    shape: EagleShape,
    params: Params,
    backend: Backend,
    embedded_BTE: Float[Array, "B T E"],
    inputs_BTD: Float[Array, "B T D"],
    positions_BT: Int[Array, "B T"],
    cache: Any,
    placement: Placement,
    context_lengths_B: Int[Array, " B"],
) -> tuple[Float[Array, "B T D"], Any]:
    """Return the layer's outputs, and its cache with the new places written.

    ``inputs_BTD`` are what `fused` made of features, or outputs of the places before.
    """
    config, backend = shape.config, drafter_backend(backend)

    def norm(name: str, values: jax.Array) -> jax.Array:
        return _applied(Norm(config, backend), params[name], values)

    embedded_BTE = embedded_BTE.astype(inputs_BTD.dtype)
    if shape.fuses:
        normed_BTD = norm("feature_norm", inputs_BTD)
        read = jnp.concatenate([norm("embedding_norm", embedded_BTE), normed_BTD], axis=-1)
        residual_BTD = normed_BTD if shape.norm_before_residual else inputs_BTD
    else:
        both = jnp.concatenate([embedded_BTE, inputs_BTD], axis=-1)
        read = residual_BTD = linear(both, params["fc"]["kernel"], params["fc"].get("bias"), backend)
    step = build_step(config, backend, positions_BT, (placement,), context_lengths_B)
    mixed_BTD, cache = _applied(Attention(config, backend, 0), params["attention"], read, cache, 0, step)
    hidden_BTD = residual_BTD + mixed_BTD
    hidden_BTD = hidden_BTD + _applied(MLP(config, backend), params["mlp"], norm("mlp_norm", hidden_BTD))
    if shape.norm_output:
        hidden_BTD = norm("final_norm", hidden_BTD)
    return hidden_BTD.astype(backend.compute_dtype), cache


def run_places(
    shape: EagleShape,
    params: Params,
    backend: Backend,
    embedded_BTE: Float[Array, "B T E"],
    inputs_BTD: Float[Array, "B T D"],
    positions_BT: Int[Array, "B T"],
    cache: EagleCache,
    slots_BT: Int[Array, "B T"],
    mask_BTS: Bool[Array, "B T S"],
    context_lengths_B: Int[Array, " B"],
) -> tuple[Float[Array, "B T D"], EagleCache]:
    """Run the layer over places that stand in ``slots_BT`` and see the slots of a mask, their own among them."""
    # Kernels, which would want to know it otherwise, are not used.
    seen = Seen(slots_BT[:, 0], jnp.ones((1, 1, 1), bool), None, mask_BTS)
    dense = DenseCache(cache.keys[None], cache.values[None])
    placement = Placement(slots_BT, mask_BTS, seen=seen)
    hidden_BTD, dense = run_layer(
        shape, params, backend, embedded_BTE, inputs_BTD, positions_BT, dense, placement, context_lengths_B
    )
    return hidden_BTD, EagleCache(dense.keys[0], dense.values[0])


def draft_logits(
    shape: EagleShape, model: Model, params: Params, hidden: Float[Array, "B T D"]
) -> Float[Array, "B T U"]:
    """Return the logits of outputs, over the draft vocabulary if there is one."""
    if not shape.fuses:
        return model.logits(hidden)
    normed = hidden
    if not shape.norm_output:
        normed = _applied(Norm(shape.config, drafter_backend(model.decoder.backend)), params["final_norm"], hidden)
    output = {"output": params["output"]} if "output" in params else {}
    return head_logits(model, {"heads": ({},), **output}, 0, normed)


def init_eagle(shape: EagleShape, rows: int | None, key: jax.Array, dtype: str = "float32") -> Params:
    """Draw a drafter's parameters, with an output matrix of ``rows`` rows; None is one that reads the target's."""
    config, keys = shape.config, iter(jax.random.split(key, 12))
    width, heads, inputs = config.model_dim, config.head_dim, 2 * config.model_dim if shape.fuses else config.model_dim

    def linear_of(features: int, wide: int, bias: bool = False) -> Params:
        kernel = (jax.random.normal(next(keys), (features, wide), jnp.float32) / math.sqrt(wide)).astype(dtype)
        return {"kernel": kernel, **({"bias": jnp.zeros((features,), dtype)} if bias else {})}

    def norm_of(size: int = width) -> Params:
        return {"scale": jnp.ones((size,), dtype)}

    attention = {
        "query": linear_of(config.num_heads * heads, inputs, config.qkv_bias),
        "key": linear_of(config.num_kv_heads * heads, inputs, config.qkv_bias),
        "value": linear_of(config.num_kv_heads * heads, inputs, config.qkv_bias),
        "output": linear_of(width, config.num_heads * heads, config.output_bias),
        **({"query_norm": norm_of(heads), "key_norm": norm_of(heads)} if config.qk_norm else {}),
    }
    mlp = {
        "gate": linear_of(config.ffn_dim, width, config.mlp_bias),
        "up": linear_of(config.ffn_dim, width, config.mlp_bias),
        "down": linear_of(width, config.ffn_dim, config.mlp_bias),
    }
    params = {"fc": linear_of(width, shape.fc_width), "attention": attention, "mlp": mlp, "mlp_norm": norm_of()}
    if shape.fuses:
        params |= {name: norm_of() for name in ("embedding_norm", "feature_norm", "final_norm")}
    if rows is not None:
        params["output"] = linear_of(rows, width)
    return params


def _applied(module: Any, params: Params, *inputs: Any) -> Any:
    return module.apply({"params": params}, *inputs)
