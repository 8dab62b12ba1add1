"""Draft models as a target needs them: loaded in its dtype, split over its devices, of its vocabulary."""

from typing import NamedTuple

from jaxinfer.checkpoint.few_bits import FewBits
from jaxinfer.checkpoint.first_layers import first_layers
from jaxinfer.checkpoint.matrix_readers import choose_reader
from jaxinfer.checkpoint.open import open_checkpoint
from jaxinfer.decoding.strategy import Target
from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.registry import family_of
from jaxinfer.notation import Params
from jaxinfer.ops.backend import Backend, choose_backend


class LoadedModel(NamedTuple):
    """A draft model as it is split over the target's devices."""

    config: DecoderConfig
    backend: Backend
    params: Params


def load_draft_model(
    strategy: str, model: str, target: Target, layers: int = 0, few_bits: FewBits | None = None
) -> LoadedModel:
    """Load what ``model`` names, as `jaxinfer.load` understands it, or its first ``layers``, for a strategy.

    Raise InvalidOption where its tokens are not the target's.
    """
    checkpoint = open_checkpoint(model)
    if layers:
        checkpoint = first_layers(checkpoint, layers)
    family = family_of(checkpoint.config)
    config = family.translate(checkpoint.config)
    check_vocabulary(strategy, model, config, target)
    if not target.speaks_like(checkpoint):
        raise InvalidOption(
            f"{strategy}: the tokenizer of {model} gives other ids than the target's: choose a draft model "
            "of the same vocabulary"
        )
    backend = choose_backend(target.backend.param_dtype, scan_layers=target.backend.scan_layers)
    reader = choose_reader(checkpoint, few_bits, backend, is_split=target.partitioner.mesh is not None)
    names = family.tensor_names(config)
    params = target.partitioner.load_params(checkpoint, names, config, backend, matrices=reader)
    part = target.partitioner.partition(config, backend)
    return LoadedModel(part.config, part.backend, params)


def place_draft_model(
    strategy: str, model: str, config: DecoderConfig, backend: Backend, params: Params, target: Target
) -> LoadedModel:
    """Split a draft model that is at hand over the target's devices."""
    check_vocabulary(strategy, model, config, target)
    params = target.partitioner.place_params(config, backend, params)
    part = target.partitioner.partition(config, backend)
    return LoadedModel(part.config, part.backend, params)


def check_vocabulary(strategy: str, model: str, config: DecoderConfig, target: Target) -> None:
    """Raise InvalidOption where a draft model has another number of tokens than the target."""
    if config.num_tokens != target.config.num_tokens:
        raise InvalidOption(
            f"{strategy}: {model or 'the draft model'} has {config.num_tokens} tokens, the target "
            f"{target.config.num_tokens}: choose a draft model of the same vocabulary"
        )
