"""The forms of weights in few bits, as data: what a code stands for, and how many of them share a scale.

A weight is ``scale * level[code] + minimum``. Codes of 4 bits lie 32 to a run of 16 bytes, as in GGUF's blocks: byte i
has code i in its low half and code i + 16 in its high half. Codes of 8 bits are signed bytes, which are their own
levels. Every level is exact in bfloat16, so that products with bfloat16 rows are exact before they are added.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from jaxinfer.errors import InvalidOption

# The weights of a run: products advance by so many.
RUN = 32
GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class Format:
    """What quantized weights are: ``bits`` of a code, the weights of a ``group`` (None: the row), and the levels.

    ``levels`` are those of 4-bit codes, in the codes' order. With ``has_minima`` each group has a minimum, which is
    added. Scales and minima are float16, but float32 where a whole row has one.
    """

    bits: int
    group: int | None
    levels: tuple[float, ...] = ()
    has_minima: bool = False

    @property
    def scale_dtype(self) -> str:
        """The dtype of scales and minima."""
        return "float32" if self.group is None else "float16"

    @property
    def offset(self) -> int | None:
        """What is subtracted from a 4-bit code to give its level; None where levels are no such integers."""
        first = self.levels[0] if self.levels else 0.0
        return -int(first) if all(level == first + code for code, level in enumerate(self.levels)) else None

    def groups(self, width: int) -> int:
        """Return the number of groups in a row of ``width`` weights."""
        return 1 if self.group is None else width // self.group

    def row_bytes(self, width: int) -> int:
        """Return the number of bytes of a row's codes."""
        return width * self.bits // 8

    def check_width(self, name: str, width: int) -> None:
        """Raise InvalidOption for rows that do not divide into groups."""
        unit = self.group or RUN
        if width % unit:
            mend = "a smaller group, or int8" if unit > RUN else "another dtype instead of weights="
            raise InvalidOption(f"{name}: its rows of {width} weights do not divide into groups of {unit}; use {mend}")


_SIGNED = tuple(float(level) for level in range(-8, 8))
_UNSIGNED = tuple(float(level) for level in range(16))

# GGUF's types of blocks that are multiplied in their own bits.
GGUF_FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "Q4_0": Format(4, 32, _SIGNED),
        "Q4_1": Format(4, 32, _UNSIGNED, has_minima=True),
        "Q8_0": Format(8, 32),
    }
)

INT8 = Format(8, None)


def int4(group: int, is_symmetric: bool) -> Format:
    """Return the form of 4-bit integers with one scale for each group and, if they are not symmetric, one minimum."""
    return Format(4, group, _SIGNED) if is_symmetric else Format(4, group, _UNSIGNED, has_minima=True)
