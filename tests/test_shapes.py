"""Arrays of another shape or kind than a function names are refused at the call, in the library and in tests."""

from dataclasses import dataclass

import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float, Int, TypeCheckError

from jaxinfer.sampling.transforms import temper
from tests.shapes import check

ROWS = jnp.zeros((2, 3))


@check
def product(left_BD: Float[Array, "B D"], right_BD: Float[Array, "B D"], count: int = 1) -> Float[Array, "B D"]:
    """Return two rows' product, or as many rows of it as are asked for."""
    return (left_BD * right_BD)[:count]


@check
@dataclass
class Held:
    """Rows beside ids, or none."""

    rows_BD: Float[Array, "B D"] | None
    ids_B: Int[Array, " B"]


def test_letters_mean_one_size_in_arguments_and_results() -> None:
    assert product(ROWS, ROWS, 2).shape == (2, 3)
    with pytest.raises(TypeCheckError, match="right_BD"):
        product(ROWS, ROWS[:, :2], 2)
    with pytest.raises(TypeCheckError, match="return"):
        product(ROWS, ROWS, 1)
    with pytest.raises(TypeCheckError, match="left_BD"):
        product(ROWS.astype(int), ROWS, 2)


def test_a_call_within_a_call_has_letters_of_its_own() -> None:
    @check
    def halves(rows_BD: Float[Array, "B D"]) -> list[Float[Array, "C D"]]:
        return [product(rows_BD[:1], rows_BD[:1]), rows_BD[1:]]

    assert [half.shape for half in halves(ROWS)] == [(1, 3), (1, 3)]


def test_fields_of_dataclasses_are_checked() -> None:
    Held(None, jnp.zeros(2, int))
    with pytest.raises(TypeCheckError, match="ids_B"):
        Held(ROWS, jnp.zeros(3, int))


def test_methods_of_a_class_and_properties_are_checked() -> None:
    class Owner:
        @check
        @staticmethod
        def rows(rows_BD: Float[Array, "B D"]) -> int:
            return len(rows_BD)

        @check
        @classmethod
        def named(cls, rows_BD: Float[Array, "B D"]) -> str:
            return cls.__name__

        @check
        @property
        def ids_B(self) -> Int[Array, " B"]:
            return ROWS

    assert Owner.rows(ROWS) == 2
    assert Owner.named(ROWS) == "Owner"
    for call in (lambda: Owner.rows(ROWS[0]), lambda: Owner.named(ROWS[0]), lambda: Owner().ids_B):
        with pytest.raises(TypeCheckError):
            call()


def test_what_names_no_array_is_left_as_it_is() -> None:
    def plain(count: int, *names: str) -> list[str]:
        return [*names] * count

    assert check(plain) is plain


def test_the_library_is_checked() -> None:
    with pytest.raises(TypeCheckError, match="logits_BMV"):
        temper(ROWS, None)
