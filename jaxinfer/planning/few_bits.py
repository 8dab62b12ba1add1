"""Describes a decoder's parameters in few bits, as a TPU holds them."""

from collections.abc import Mapping
from typing import Any

import jax

from jaxinfer.checkpoint.few_bits import FewBits, parse_few_bits
from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.few_bits import change_matrices, check_has_experts, is_table
from jaxinfer.notation import Params
from jaxinfer.ops.few_bits.columns import maybe_by_columns
from jaxinfer.ops.few_bits.round_to_nearest import round_to_nearest
from jaxinfer.ops.few_bits.rounded_rows import NO_EXPERTS, multiplies_rounded
from jaxinfer.ops.few_bits.split import check_split, part_shardings


def planned_weights(weights: str | None) -> FewBits | None:
    """Return what ``weights`` asks for; raise InvalidOption for what only a file knows."""
    few_bits = parse_few_bits(weights)
    if few_bits is not None and few_bits.form is None:
        raise InvalidOption(f"weights {weights!r}: a plan knows no file's blocks; use int8 or int4:group=64")
    return few_bits


def check_planned(activations: str | None, weights: FewBits | None, config: DecoderConfig) -> None:
    """Raise InvalidOption for activations in bytes that a model, or a form of weights, or none, does not go with."""
    form = None if weights is None else weights.form
    if activations is not None and config.experts is not None:
        raise InvalidOption(f"activations {activations!r}: {NO_EXPERTS}")
    if activations is not None and (form is None or not multiplies_rounded(form)):
        raise InvalidOption(f"activations {activations!r} multiply weights in int8 or int4: give one of these")


def described_in_few_bits(params: Mapping[str, Any], weights: FewBits) -> Params:
    """Return described parameters with kernels in a form and tables in bytes, placed as their parts are."""
    form, only_experts = weights.form, weights.only_experts
    assert form is not None
    check_has_experts(params, only_experts, f"weights {weights.name!r}")

    def rounded(path: tuple[str, ...], struct: Any) -> Any:
        if not weights.takes(path):
            return struct
        chosen, name = form.of_tables if is_table(path) else form, f"weights: {'.'.join(path)}"
        chosen.check_width(name, struct.shape[-1])
        array = jax.eval_shape(lambda weights: round_to_nearest(weights, chosen), struct)
        width = check_split(array, struct.sharding, name)
        array = jax.eval_shape(lambda array: maybe_by_columns(array, width), array)
        return jax.tree.map(
            lambda part, where: jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=where),
            array,
            part_shardings(array, struct.sharding),
        )

    return change_matrices(params, rounded)
