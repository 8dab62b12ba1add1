"""Describes a decoder's parameters in few bits, as a TPU holds them."""

from collections.abc import Mapping
from typing import Any

import jax

from jaxinfer.checkpoint.few_bits import parse_few_bits
from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.few_bits import change_matrices, is_table
from jaxinfer.notation import Params
from jaxinfer.ops.few_bits.columns import maybe_by_columns
from jaxinfer.ops.few_bits.formats import INT8, Format
from jaxinfer.ops.few_bits.round_to_nearest import round_to_nearest
from jaxinfer.ops.few_bits.rounded_rows import NO_EXPERTS, multiplies_rounded
from jaxinfer.ops.few_bits.split import check_split, part_shardings


def planned_form(weights: str | None) -> Format | None:
    """Return the form of kernels that ``weights`` asks for; raise InvalidOption for one that only a file knows."""
    few_bits = parse_few_bits(weights)
    if few_bits is not None and few_bits.form is None:
        raise InvalidOption(f"weights {weights!r}: a plan knows no file's blocks; use int8 or int4:group=64")
    return None if few_bits is None else few_bits.form


def check_planned(activations: str | None, form: Format | None, config: DecoderConfig) -> None:
    """Raise InvalidOption for activations in bytes that a model, or a form of weights, or none, does not go with."""
    if activations is not None and config.experts is not None:
        raise InvalidOption(f"activations {activations!r}: {NO_EXPERTS}")
    if activations is not None and (form is None or not multiplies_rounded(form)):
        raise InvalidOption(f"activations {activations!r} multiply weights in int8 or int4: give one of these")


def described_in_few_bits(params: Mapping[str, Any], form: Format) -> Params:
    """Return described parameters with kernels in a form and tables in bytes, placed as their parts are."""

    def rounded(path: tuple[str, ...], struct: Any) -> Any:
        chosen, name = INT8 if is_table(path) else form, f"weights: {'.'.join(path)}"
        chosen.check_width(name, struct.shape[-1])
        array = jax.eval_shape(lambda weights: round_to_nearest(weights, chosen), struct)
        width = check_split(array, struct.sharding, name)
        if path[0] != "embed":
            array = jax.eval_shape(lambda array: maybe_by_columns(array, width), array)
        return jax.tree.map(
            lambda part, where: jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=where),
            array,
            part_shardings(array, struct.sharding),
        )

    return change_matrices(params, rounded)
