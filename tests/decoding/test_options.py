"""A strategy's options are checked in one line that names the strategy, the option and what it may be."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from jaxinfer.decoding.options import check_choice, check_range
from jaxinfer.errors import InvalidOption


@dataclass(frozen=True)
class Named:
    """Stands for a strategy, and lets values of any type in."""

    name: ClassVar[str] = "named"

    count: int = 1
    share: float = 0.5
    rule: Any = True


@pytest.mark.parametrize("value", [2.5, True, "2", None, 0, 10, float("nan")])
def test_a_count_is_a_whole_number_within_its_range(value):
    check_range(Named(count=9), "count", 1, 9)
    with pytest.raises(InvalidOption, match=r"^named: count=.* is not a whole number from 1 to 9$"):
        check_range(Named(count=value), "count", 1, 9)


@pytest.mark.parametrize("value", [False, "0.5", 1.5, float("nan")])
def test_a_share_is_a_number_within_its_range(value):
    for share in (0, 0.25, 1):
        check_range(Named(share=share), "share", 0, 1)
    with pytest.raises(InvalidOption, match=r"^named: share=.* is not a number from 0 to 1$"):
        check_range(Named(share=value), "share", 0, 1)


@pytest.mark.parametrize("value", ["sometimes", None, "true"])
def test_a_choice_is_one_of_those_offered(value):
    for rule in (True, False, "never"):
        check_choice(Named(rule=rule), "rule", (True, False, "never"))
    with pytest.raises(InvalidOption, match=r"^named: rule=.* is none of true, false, never$"):
        check_choice(Named(rule=value), "rule", (True, False, "never"))
