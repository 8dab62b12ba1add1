"""The forms of weights in few bits, as data: what a code stands for, and how many of them share a scale.

A weight is ``scale * level[code] + minimum``, or ``scale * (level[code] - zero)``. Codes lie in runs of 32: 16 bytes,
of which byte i has the low four bits of code i in its low half and those of code i + 16 in its high half, as in GGUF's
blocks; then the fifth bits, bit i of byte j that of code 8 j + i, or the fifth and sixth bits, bits 2 i and 2 i + 1 of
byte j those of code 8 i + j. Codes of 8 bits are signed bytes, which are their own levels, or stand for levels by their
bits. Every level is exact in bfloat16, so that products with bfloat16 rows are exact before they are added; those of
`NORMAL` alone are not, and the CPU's products round them to it, as they do their rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.errors import InvalidOption

# The weights of a run: products advance by so many.
RUN = 32
GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class Format:
    """What quantized weights are: ``bits`` of a code, the weights of a ``group`` (None: the row), and the levels.

    ``levels`` are in the codes' order; codes of 8 bits without levels are integers. With ``has_minima`` each group has
    a minimum, which is added. Scales and minima are float16, and float32 where a whole row has one. Where ``supers``
    groups share a scale of scales, and a scale of minima, they are integers, of which these, in float16, are the units.
    ``scale_type`` is another dtype of scales and minima: float32, bfloat16 or float16; or uint8, exponents of powers of
    two with the bias of float32. With ``has_zeros`` each group
    has an integer, its zero, which is subtracted from the levels. With ``is_ordered`` groups are those of a row whose
    inputs are taken in another order, one for the whole matrix.

    A sparse form stores some weights of a row, in bfloat16, and the others are zero: ``kept`` (2, 4) keeps 2 of each 4
    weights; with a ``block`` of `RUN` weights (1, 2) keeps half of a row's blocks, whichever they are. The first has a
    bit for each weight, bit i of byte j for weight 8 j + i; the other lists the blocks of each row, ascending.
    """

    bits: int
    group: int | None
    levels: tuple[float, ...] = ()
    has_minima: bool = False
    supers: int | None = None
    scale_type: str | None = None
    has_zeros: bool = False
    is_ordered: bool = False
    kept: tuple[int, int] | None = None
    block: int = 1

    @property
    def scale_dtype(self) -> str:
        """The dtype of scales and minima."""
        if self.supers is not None:
            return "int8"
        if self.scale_type is not None:
            return self.scale_type
        return "float32" if self.group is None else "float16"

    @property
    def of_tables(self) -> "Format":
        """The form of the tables beside kernels of this one: bytes, in groups where those of kernels are."""
        return self if self.bits == INT8.bits and self.group is not None and not self.levels else INT8

    @property
    def is_shifted(self) -> bool:
        """Whether something is added to all weights of a group, or subtracted."""
        return self.has_minima or self.has_zeros

    @property
    def unit(self) -> int:
        """What the width of a row must be a multiple of."""
        if self.kept is not None and self.block > 1:
            return self.block * self.kept[1]
        return max(RUN, (self.group or RUN) * (self.supers or 1))

    @property
    def part_names(self) -> tuple[str, ...]:
        """The names of the arrays of a `QuantizedArray`."""
        if self.kept is not None:
            return "codes", "places"
        names = ["scales", "minima"][: 1 + self.has_minima]
        units = ["scale_units", "minima_units"][: len(names)] if self.supers is not None else []
        others = [name for name, is_there in (("zeros", self.has_zeros), ("order", self.is_ordered)) if is_there]
        return ("codes", *names, *units, *others)

    def parts(self, outputs: int, width: int) -> dict[str, tuple[tuple[int, int], str]]:
        """Return the shape and the dtype of each array of a matrix ``[outputs, width]``, by its name."""
        if self.kept is not None:
            places = ((outputs, self.num_kept(width) // self.block), "uint16") if self.block > 1 else None
            codes = (outputs, self.num_kept(width)), "bfloat16"
            return {"codes": codes, "places": places or ((outputs, width // 8), "uint8")}
        found = {"codes": ((outputs, self.row_bytes(width)), "int8" if self.bits == 8 else "uint8")}
        for name in self.part_names[1:]:
            if name == "order":
                found[name] = (1, width), "int32"
                continue
            is_unit = name.endswith("_units")
            groups = self.groups(width) // (self.supers or 1) if is_unit else self.groups(width)
            dtype = "int8" if name == "zeros" else "float16" if is_unit else self.scale_dtype
            found[name] = (outputs, groups), dtype
        return found

    @property
    def offset(self) -> int | None:
        """What is subtracted from a code to give its level; None where levels are no such integers."""
        if self.kept is not None:
            return None
        first = self.levels[0] if self.levels else 0.0
        if self.bits == 8:
            return None if self.levels else 0
        return -int(first) if all(level == first + code for code, level in enumerate(self.levels)) else None

    def groups(self, width: int) -> int:
        """Return the number of groups in a row of ``width`` weights."""
        return 1 if self.group is None else width // self.group

    def row_bytes(self, width: int) -> int:
        """Return the number of bytes of a row's codes."""
        return self.num_kept(width) * self.bits // 8

    def num_kept(self, width: int) -> int:
        """Return how many weights of a row of ``width`` are stored."""
        return width if self.kept is None else width * self.kept[0] // self.kept[1]

    def width_of(self, num_bytes: int) -> int:
        """Return the width of a row whose codes take so many bytes."""
        stored = num_bytes * 8 // self.bits
        return stored if self.kept is None else stored * self.kept[1] // self.kept[0]

    def check_width(self, name: str, width: int, mend: str | None = None) -> None:
        """Raise InvalidOption, which says what to use, for rows that do not divide into groups."""
        unit = self.unit
        if width % unit:
            mend = mend or ("a smaller group, or int8" if unit > RUN else "another dtype instead of weights=")
            mend = "another share of blocks, or 2:4" if self.block > 1 else mend
            raise InvalidOption(f"{name}: its rows of {width} weights do not divide into groups of {unit}; use {mend}")


def _integers(bits: int, is_signed: bool) -> tuple[float, ...]:
    first = -(1 << bits - 1) if is_signed else 0
    return tuple(float(first + code) for code in range(1 << bits))


# Floats with 2 bits of exponent and 1 of mantissa (OCP Microscaling Formats), by their bits.
_SIZES_OF_4_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4 = (*_SIZES_OF_4_BITS, *(-size for size in _SIZES_OF_4_BITS))
MXFP4 = Format(4, 32, FP4, scale_type="uint8")
# A power of two with the exponent zero is half of the least that float32 holds with a whole mantissa.
LEAST_POWER_BITS = 1 << 22
# With larger exponents the largest level is no finite number.
MOST_EXPONENT = 252

# GGUF's types of blocks that are multiplied in their own bits.
GGUF_FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "Q4_0": Format(4, 32, _integers(4, True)),
        "Q4_1": Format(4, 32, _integers(4, False), has_minima=True),
        "Q5_0": Format(5, 32, _integers(5, True)),
        "Q5_1": Format(5, 32, _integers(5, False), has_minima=True),
        "Q8_0": Format(8, 32),
        "Q4_K": Format(4, 32, _integers(4, False), has_minima=True, supers=8),
        "Q5_K": Format(5, 32, _integers(5, False), has_minima=True, supers=8),
        "Q6_K": Format(6, 16, _integers(6, True), supers=16),
        "MXFP4": MXFP4,
    }
)
INT8 = Format(8, None)

# Shares of a row's blocks that sparse forms keep.
SHARES = ((1, 4), (1, 2), (2, 3), (3, 4))
TWO_OF_FOUR = Format(16, None, kept=(2, 4))

# Quantiles of a normal distribution between -1 and 1 (QLoRA, 2305.14314), rounded to bfloat16.
_NORMAL = (
    *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)


def _levels_of(numbers: np.ndarray) -> tuple[float, ...]:
    return tuple(map(float, numbers.astype(ml_dtypes.bfloat16).astype(np.float32)))


# Floats of 4 bits of exponent and 3 of mantissa; the two codes of no number are never written.
FP8 = Format(
    8, None, _levels_of(np.nan_to_num(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)))
)

# Codes that published checkpoints hold: integers, and quantiles and floats of 4 bits as bitsandbytes has them (the
# latter are multiples of 1/12 there).
SIGNED, UNSIGNED = _integers(4, True), _integers(4, False)
NORMAL = tuple(float(np.float32(level)) for level in _NORMAL)
FP4_TIMES_12 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0, -0.0, -0.0625, -8.0, -12.0, -4.0, -6.0, -2.0, -3.0)


def format_from(fields: Mapping[str, Any]) -> Format:
    """Return the format with these fields, as `dataclasses.asdict` gives them; raise ValueError if there is none."""
    try:
        kept = fields.get("kept")
        form = Format(
            **{**fields, "levels": tuple(map(float, fields["levels"])), "kept": None if kept is None else tuple(kept)}
        )
        whole = all(type(number) is int and number > 0 for number in (form.bits, form.group or 1, form.supers or 1))
    except (KeyError, TypeError) as error:
        raise ValueError(f"no format: {error}") from None
    if form.kept is not None:
        if form not in (TWO_OF_FOUR, *map(blocks, SHARES)):
            raise ValueError(f"no format keeps {form.kept} of blocks of {form.block!r}")
        return form
    if (
        not whole
        or form.block != 1
        or form.bits not in (4, 5, 6, 8)
        or len(form.levels) not in ({0, 256} if form.bits == 8 else {1 << form.bits})
        or form.scale_type not in (None, "float32", "bfloat16", "float16", "uint8")
        or not all(type(each) is bool for each in (form.has_minima, form.has_zeros, form.is_ordered))
    ):
        raise ValueError(f"no format has {form.bits!r} bits and {len(form.levels)} levels")
    return form


def nf4(group: int) -> Format:
    """Return the form of 4-bit normal floats with one scale for each group."""
    return Format(4, group, _levels_of(np.array(_NORMAL, np.float32)))


def int4(group: int, is_symmetric: bool) -> Format:
    """Return the form of 4-bit integers with one scale for each group and, if they are not symmetric, one minimum."""
    return Format(4, group, _integers(4, is_symmetric), has_minima=not is_symmetric)


def blocks(kept: tuple[int, int]) -> Format:
    """Return the sparse form of rows of which a share of blocks of `RUN` weights, a cache line each, is stored."""
    return Format(16, None, kept=kept, block=RUN)
