"""Strategies for plans: they hold the shapes of their weights, not the weights."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxinfer.checkpoint.first_layers import check_layers
from jaxinfer.decoding.registry import parse_strategy
from jaxinfer.decoding.strategies.auto import Auto
from jaxinfer.decoding.strategies.cascade import Cascade
from jaxinfer.decoding.strategies.dflash import DFlash
from jaxinfer.decoding.strategies.draft_model import DraftModel
from jaxinfer.decoding.strategies.eagle import Eagle
from jaxinfer.decoding.strategies.medusa import Medusa
from jaxinfer.decoding.strategies.mtp import Mtp
from jaxinfer.decoding.strategies.streams import Streams
from jaxinfer.decoding.strategies.sum_of_drafters import SumOfDrafters
from jaxinfer.decoding.strategies.triforce import TriForce
from jaxinfer.decoding.strategy import Strategy, Target
from jaxinfer.decoding.trees.dynamic import Growth, check_growth, read_growth
from jaxinfer.decoding.trees.static import tree_depth
from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import abstract_params
from jaxinfer.models.drafters.dflash import abstract_dflash, dflash_for
from jaxinfer.models.drafters.eagle import init_eagle, shape_for
from jaxinfer.models.drafters.mtp import init_mtp, mtp_config
from jaxinfer.models.drafters.streams import StreamsConfig, init_streams
from jaxinfer.notation import Params
from jaxinfer.parallel.mesh import MeshConfig
from jaxinfer.parallel.partitioner import Partitioned
from jaxinfer.parallel.rules import parameter_shardings
from jaxinfer.planning.compile import split_decoder
from jaxinfer.planning.few_bits import planned_weights
from jaxinfer.planning.known_models import planned_config
from jaxinfer.planning.placement import placed, placed_params

# As many as the depth of the published trees.
_NUM_HEADS = 4
# The rows of published drafters' output matrices (2503.01840).
_EAGLE_ROWS = 32000


def planned_strategy(spec: str, config: DecoderConfig, mesh: MeshConfig, dtype: str) -> Strategy:
    """Return the strategy of a specification for a model on a mesh, with shapes in place of weights.

    A draft model is named as planned models are (`planned_config`). Medusa heads, streams, EAGLE and DFlash drafters
    without a folder get the published sizes. Raise InvalidOption if one does not suit the model.
    """
    return _described(parse_strategy(spec), config, mesh, dtype)


def _described(strategy: Strategy, config: DecoderConfig, mesh: MeshConfig, dtype: str) -> Strategy:
    if isinstance(strategy, Auto) and strategy.weights not in ("", "none"):
        raise InvalidOption(
            f"auto: weights= is not planned as one program: plan auto by itself, and cascade:weights={strategy.weights}"
        )
    if isinstance(strategy, SumOfDrafters):
        strategy = strategy.bounded_for(Target(*split_decoder(config, mesh, dtype), {}))
        parts = [_described(part, config, mesh, dtype) for part in strategy.asked_parts]
        depth = max(part.max_depth for part in parts)
        return replace(strategy, parts=tuple(part.in_sum(depth) for part in parts))
    if strategy.is_search:
        named = "beam search" if strategy.exactness == "beam" else "tree search"
        raise InvalidOption(f"{named}, which has a loop of its own, is not planned: choose another strategy")
    target = split_decoder(config, mesh, dtype)
    if isinstance(strategy, DraftModel):
        return _draft_model(strategy, config, mesh, dtype)
    if isinstance(strategy, Cascade):
        return _cascade(strategy, config, mesh, dtype)
    if isinstance(strategy, Medusa) and not strategy.heads:
        if (num_nodes := read_growth(strategy.tree)) is not None:
            growth = check_growth(Growth(num_nodes, _NUM_HEADS))
            return replace(strategy, growth=growth, params=_heads(target, _NUM_HEADS))
        paths = strategy.read_paths()
        return replace(strategy, paths=paths, params=_heads(target, tree_depth(paths)))
    if isinstance(strategy, DFlash) and not strategy.heads:
        return _dflash(strategy, config, mesh, dtype)
    if isinstance(strategy, Streams) and not strategy.heads:
        return _streams(strategy, target)
    if isinstance(strategy, Eagle) and not strategy.heads:
        return _eagle(strategy, target)
    if isinstance(strategy, Mtp) and not strategy.heads:
        return _mtp(strategy, target, mesh)
    if isinstance(strategy, TriForce) and strategy.drafter:
        part = _small_model(strategy.name, strategy.drafter, 0, config, mesh, dtype)
        params = placed(abstract_params(*part), parameter_shardings(*part, mesh.abstract))
        return replace(strategy, config=part.config, backend=part.backend, params=params)
    return strategy.resolve(Target(target.config, target.backend, abstract_params(*target)))


def _draft_model(strategy: DraftModel, config: DecoderConfig, mesh: MeshConfig, dtype: str) -> DraftModel:
    if not strategy.model:
        raise InvalidOption("draft_model: name the draft model, as in draft_model:model=NAME_OR_PATH")
    if strategy.devices:
        raise InvalidOption(
            "draft_model: devices= is not planned as one program: plan the draft model by itself, and the target with "
            f"--nodes {strategy.num_nodes}"
        )
    strategy = strategy.shaped(config)
    if strategy.shares_weights:
        check_layers(config, strategy.layers, "draft_model: layers")
        return strategy
    part = _small_model(strategy.name, strategy.model, strategy.layers, config, mesh, dtype)
    return replace(strategy, config=part.config, backend=part.backend, params=abstract_params(*part))


def _cascade(strategy: Cascade, config: DecoderConfig, mesh: MeshConfig, dtype: str) -> Cascade:
    """Describe the weights in fewer bits, and drafters that need no training unless a folder of heads is named."""
    part = split_decoder(config, mesh, dtype)
    drafter = _described(strategy.drafter_for(Target(*part, {})), config, mesh, dtype)
    params = placed_params(*part, mesh.abstract, planned_weights(strategy.weights))
    return replace(strategy, drafter=drafter, config=part.config, backend=part.backend, params=params)


def _small_model(
    strategy: str, model: str, layers: int, target: DecoderConfig, mesh: MeshConfig, dtype: str
) -> Partitioned:
    """Return a draft model as it is split over the devices; raise InvalidOption where its vocabulary is another."""
    own = planned_config(model, layers or None)
    if own.num_tokens != target.num_tokens:
        raise InvalidOption(
            f"{strategy}: {model} has {own.num_tokens} tokens, the target {target.num_tokens}: "
            "choose a draft model of the same vocabulary"
        )
    return split_decoder(own, mesh, dtype)


def _dflash(strategy: DFlash, config: DecoderConfig, mesh: MeshConfig, dtype: str) -> DFlash:
    """Describe a drafter of the published shape: five layers of the target's sizes, blocks of 16 (2602.06036)."""
    dflash = dflash_for(config, num_layers=5, block_size=16)
    part = split_decoder(dflash.decoder, mesh, dtype)
    own = replace(dflash, decoder=part.config)
    params = abstract_dflash(own, part.backend)
    # It has no tables of its own.
    shardings = parameter_shardings(own.decoder, part.backend, mesh.abstract)
    split = placed(params["decoder"], {name: shardings[name] for name in params["decoder"]})
    return replace(strategy.shaped(own), backend=part.backend, params={**params, "decoder": split})


def _mtp(strategy: Mtp, target: Partitioned, mesh: MeshConfig) -> Mtp:
    """Describe a layer whose block is split as the model's are."""
    params = jax.eval_shape(lambda key: init_mtp(*target, key), jax.random.key(0))
    own = mtp_config(target.config), replace(target.backend, scan_layers=False)
    blocks = placed({"layer_0": params["block"]}, parameter_shardings(*own, mesh.abstract)["blocks"])
    return replace(strategy, params={**params, "block": blocks["layer_0"]}, layer=target.config.num_layers)


def _heads(target: Partitioned, count: int) -> Params:
    """Describe heads of the published shape: a residual block and an output matrix each (2401.10774)."""
    width, dtype = target.config.model_dim, jnp.dtype(target.backend.param_dtype)
    block = {"kernel": jax.ShapeDtypeStruct((width, width), dtype), "bias": jax.ShapeDtypeStruct((width,), dtype)}
    output = {"kernel": jax.ShapeDtypeStruct((target.config.vocab_size, width), dtype)}
    return {"heads": tuple({"blocks": (block,), "output": output} for _ in range(count))}


def _streams(strategy: Streams, target: Partitioned) -> Streams:
    """Describe one stream for each depth of the tree."""
    paths = strategy.read_paths()
    streams = StreamsConfig(num_streams=tree_depth(paths))
    params = jax.eval_shape(lambda key: init_streams(streams, *target, key), jax.random.key(0))
    return replace(strategy, paths=paths, num_layers=streams.num_layers, params=params)


def _eagle(strategy: Eagle, target: Partitioned) -> Eagle:
    """Describe a drafter of the published shape: a layer like the target's, and a vocabulary of 32,000 tokens."""
    shape, rows = shape_for(target.config), min(_EAGLE_ROWS, target.config.vocab_size)
    dtype = target.backend.param_dtype
    params = jax.eval_shape(lambda key: init_eagle(shape, rows, key, dtype), jax.random.key(0))
    if rows < target.config.vocab_size:
        params["ids"] = jax.ShapeDtypeStruct((rows,), jnp.int32)
    return replace(strategy, shape=shape, params=params).resolve(Target(*target, abstract_params(*target)))
