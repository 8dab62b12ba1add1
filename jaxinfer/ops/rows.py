"""Reads and writes elements of a batch's rows, at places that each row gives.

Rows are a batch dimension, so the compiler knows that they are independent. With row indices it would not know that:
devices that hold some of the rows would send one another all places and values.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Int


def set_in_rows(rows_BS: Any, places_BT: Int[Array, "B T"], values_BT: Any) -> Array:
    """Set values at places of the second axis; places past its end are dropped."""
    return jax.vmap(lambda row_S, places_T, values_T: row_S.at[places_T].set(values_T, mode="drop"))(
        rows_BS, places_BT, values_BT
    )


def add_in_rows(rows_BS: Any, places_BT: Int[Array, "B T"], values_BT: Any) -> Array:
    """Add values at places of the second axis; places past its end are dropped."""
    return jax.vmap(lambda row_S, places_T, values_T: row_S.at[places_T].add(values_T, mode="drop"))(
        rows_BS, places_BT, values_BT
    )


def take_rows(rows_BMX: Any, places_BT: Int[Array, "B T"]) -> Array:
    """Return what stands at places of the second axis, whatever axes follow."""
    batch, count = places_BT.shape
    return jnp.take_along_axis(rows_BMX, places_BT.reshape(batch, count, *[1] * (rows_BMX.ndim - 2)), axis=1)


def take_pairs(rows_BMV: Any, first_BT: Int[Array, "B T"], second_BT: Int[Array, "B T"]) -> Array:
    """Return single numbers by their indices on the second and third axis."""
    return jax.vmap(lambda row_MV, first_T, second_T: row_MV[first_T, second_T])(rows_BMV, first_BT, second_BT)


def write_in_rows(buffer_LBSF: Any, layer: Any, slots_BT: Int[Array, "B T"], rows_BTF: Any) -> Array:
    """Set slots of one layer; slots past the end are dropped, the others must differ within a row."""
    layer_BT = jnp.broadcast_to(layer, slots_BT.shape).astype(slots_BT.dtype)
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(2,),
        inserted_window_dims=(0, 2),
        scatter_dims_to_operand_dims=(0, 2),
        operand_batching_dims=(1,),
        scatter_indices_batching_dims=(0,),
    )
    places_BTX = jnp.stack([layer_BT, slots_BT], axis=-1)
    return jax.lax.scatter(buffer_LBSF, places_BTX, rows_BTF, numbers, mode="drop", unique_indices=True)
