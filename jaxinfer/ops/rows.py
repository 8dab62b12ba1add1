"""Elements of a batch's rows, by places that each row names for itself.

Rows are a dimension that the compiler knows to be independent, where an index that counts them would hide it: devices
that hold some rows each would send one another all places and values.
"""

from typing import Any

import jax

from jaxinfer.notation import Array, Int


def set_in_rows(rows_BS: Any, places_BT: Int[Array, "B T"], values_BT: Any) -> Array:
    """Put values at places of the second axis; those past its end are dropped."""
    return jax.vmap(lambda row_S, places_T, values_T: row_S.at[places_T].set(values_T, mode="drop"))(
        rows_BS, places_BT, values_BT
    )


def add_in_rows(rows_BS: Any, places_BT: Int[Array, "B T"], values_BT: Any) -> Array:
    """Add values at places of the second axis; those past its end are dropped."""
    return jax.vmap(lambda row_S, places_T, values_T: row_S.at[places_T].add(values_T, mode="drop"))(
        rows_BS, places_BT, values_BT
    )


def take_pairs(rows_BMV: Any, first_BT: Int[Array, "B T"], second_BT: Int[Array, "B T"]) -> Array:
    """Return single numbers at places of the second and third axis."""
    return jax.vmap(lambda row_MV, first_T, second_T: row_MV[first_T, second_T])(rows_BMV, first_BT, second_BT)
