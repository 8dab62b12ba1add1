"""Draft models as a target needs them: loaded in its dtype, split over its devices, of its vocabulary."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.checkpoint.few_bits import FewBits, parse_few_bits
from jaxinfer.checkpoint.first_layers import check_layers, first_layers
from jaxinfer.checkpoint.matrix_readers import choose_reader
from jaxinfer.checkpoint.open import open_checkpoint
from jaxinfer.decoding.strategy import Target, made_anew
from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import DecoderConfig, shallower
from jaxinfer.models.decoder import abstract_params
from jaxinfer.models.families.registry import family_of
from jaxinfer.models.few_bits import change_matrices, drafting_params, in_few_bits, is_table
from jaxinfer.models.stacking import arranged
from jaxinfer.notation import Params
from jaxinfer.ops.backend import Backend, choose_backend
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.ops.few_bits.round_to_nearest import round_to_nearest

# Rounding to 4 bits changes weights that had more by some 8%, and others by what rounding to bfloat16 has.
_JUDGED_ROWS, _LOST = 64, 0.01


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
    return LoadedModel(part.config, part.backend, drafting_params(params, part.backend))


def place_draft_model(
    strategy: str, model: str, config: DecoderConfig, backend: Backend, params: Params, target: Target
) -> LoadedModel:
    """Split a draft model that is at hand over the target's devices."""
    check_vocabulary(strategy, model, config, target)
    part = target.partitioner.partition(config, backend)
    # It may have been in panels, on one device.
    params = target.partitioner.place_params(config, backend, drafting_params(params, part.backend))
    return LoadedModel(part.config, part.backend, params)


def in_fewer_bits(strategy: str, few_bits: FewBits | None, target: Target, layers: int = 0) -> LoadedModel:
    """Round the target's own weights, or those of its first ``layers``, to fewer bits; what else it has is shared.

    Raise InvalidOption for bits that weights are not rounded to.
    """
    if few_bits is None or few_bits.form is None:
        named = "no weights" if few_bits is None else few_bits.name
        raise InvalidOption(f"{strategy}: {named} is no form to round the target to: use int4 or int8")
    form, config = few_bits.form, target.config
    if layers:
        check_layers(config, layers, f"{strategy}: layers")
        config = shallower(config, layers)
    # Drafts need not have the bits of other steps. Weights in few bits are read whole.
    backend = replace(target.backend, step_rows=1, sparsity=None)
    part = target.partitioner.partition(config, backend)

    def rounded() -> Params:
        params = target.params
        if layers:
            params = arranged(params, abstract_params(config, target.backend))
        named = f"{strategy}: weights={few_bits.name}"
        params = in_few_bits(params, form, named, only_experts=few_bits.only_experts)
        return drafting_params(target.partitioner.place_params(config, backend, params), part.backend)

    # What is not rounded is the target's own; a file would hold another copy of it.
    shares_much = few_bits.only_experts or form.kept is not None
    once = made_anew if shares_much or part.backend.mesh is not None else target.made_once
    params = once(lambda: (config, replace(backend, activations=None), few_bits), rounded)
    return LoadedModel(part.config, part.backend, params)


def loses_nothing(weights: str, target: Target) -> bool:
    """Whether a target's weights are numbers of a form already, judged by a kernel of its first layer.

    False for a target in few bits or on a mesh, or whose kernels have no groups of the form.
    """
    few_bits = parse_few_bits(weights)
    form = None if few_bits is None else few_bits.form
    if form is None or target.partitioner.mesh is not None:
        return False

    # Traced, so that of all kernels no more is computed than what is looked at.
    def share_lost(params: Params) -> Any:
        kernels: list[Any] = []

        def note(path: tuple[str, ...], matrix: Any) -> Any:
            if not is_table(path):
                kernels.append(matrix)
            return matrix

        change_matrices(params, note)
        if any(isinstance(kernel, QuantizedArray) or kernel.shape[-1] % form.group for kernel in kernels):
            return jnp.inf
        first = kernels[0].reshape(-1, kernels[0].shape[-1])[:_JUDGED_ROWS].astype(jnp.float32)
        return jnp.linalg.norm(round_to_nearest(first, form).dequantize() - first) / jnp.linalg.norm(first)

    return bool(jax.jit(share_lost)(target.params) <= _LOST)


def check_vocabulary(strategy: str, model: str, config: DecoderConfig, target: Target) -> None:
    """Raise InvalidOption where a draft model has another number of tokens than the target."""
    if config.num_tokens != target.config.num_tokens:
        raise InvalidOption(
            f"{strategy}: {model or 'the draft model'} has {config.num_tokens} tokens, the target "
            f"{target.config.num_tokens}: choose a draft model of the same vocabulary"
        )
