"""A checkpoint of a model's first layers: what LayerSkip calls an early exit (Elhoushi et al., 2404.16710)."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.errors import InvalidOption, UnsupportedModel, shown
from jaxinfer.models.config import DecoderConfig, shallower
from jaxinfer.models.families.family import TensorNames, names_of
from jaxinfer.models.families.registry import family_of

# The keys of lists with an entry for each layer, and of a list of layers.
_BY_LAYER, _OF_LAYERS = ("layer_types", "no_rope_layers"), "mlp_only_layers"
# Layers after the last one, which predict further tokens: an early exit has none.
_FURTHER = "num_nextn_predict_layers"


def first_layers(checkpoint: Checkpoint, count: int | None) -> Checkpoint:
    """Return the checkpoint of the first ``count`` layers, the final norm and the output matrix; None is all layers.

    Its ``config`` is that of a model of so many layers. Of the other layers nothing is read. Raises InvalidOption for
    a number that is not among the model's, and UnsupportedModel where the config cannot say what the first layers are.
    """
    if count is None:
        return checkpoint
    family = family_of(checkpoint.config)
    whole = family.translate(checkpoint.config)
    check_layers(whole, count)
    if count == whole.num_layers:
        return checkpoint
    config = _cut(checkpoint.config, whole.num_layers, count)
    if _described(family.translate(config)) != _described(shallower(whole, count)):
        raise UnsupportedModel(f"{checkpoint.origin}: its config.json has no form for the first {count} layers alone")
    left_out = _later_tensors(family.tensor_names(whole), checkpoint, range(count, whole.num_layers))
    folded = checkpoint.folded and checkpoint.folded.first(count)
    return replace(checkpoint, config=config, left_out=checkpoint.left_out | left_out, folded=folded)


def check_layers(config: DecoderConfig, count: object, named: str = "layers") -> None:
    """Raise InvalidOption, which begins with ``named``, unless a model has so many layers."""
    if type(count) is not int or not 1 <= count <= config.num_layers:
        raise InvalidOption(f"{named} {shown(count)}: the model has {config.num_layers} layers: choose 1 to that")


def _cut(config: Mapping[str, Any], num_layers: int, count: int) -> dict[str, Any]:
    changed = dict(config)
    if isinstance(config.get("text_config"), Mapping):
        return changed | {"text_config": _cut(config["text_config"], num_layers, count)}
    changed["n_layer" if config.get("model_type") == "gpt2" else "num_hidden_layers"] = count
    for key in _BY_LAYER:
        if isinstance(config.get(key), list | tuple):
            changed[key] = list(config[key][:count])
    if isinstance(config.get(_OF_LAYERS), list | tuple):
        changed[_OF_LAYERS] = [layer for layer in config[_OF_LAYERS] if layer < count]
    if _FURTHER in config:
        changed[_FURTHER] = 0
    return changed


def _described(config: DecoderConfig) -> tuple[Any, ...]:
    """Return all that a config says, however its patterns are written."""
    experts = config.experts and replace(config.experts, layer_pattern=())
    return replace(config, layer_pattern=config.layers, experts=experts), config.bodies


def _later_tensors(names: TensorNames, checkpoint: Checkpoint, layers: range) -> frozenset[str]:
    """Return the tensors of these layers, and those that the whole model has no need for."""
    found = checkpoint.tensors.shapes().keys()
    names = names.spelled_in(found)
    blocks = [name for source in names.block.values() for name in names_of(source)]
    later = {name.format(layer=layer) for name in blocks for layer in layers}
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in names.ignored) or r"(?!)")
    return frozenset(name for name in found if name in later or ignored.fullmatch(name))
