"""What loaded adapters change of the embedding and of the output matrix, each row's own.

Of each table an adapter may have, in this order: a whole one instead of it, rows of some tokens instead of its rows,
and a product of small matrices that is added (LoRA; Hu et al., 2106.09685). For N adapters these are:

* ``"copy_0"``, ``"copy_1"``, ...: whole tables ``[V, D]``; ``"copy_of": [N]`` int32 says which is an adapter's, -1 for
  none.
* ``"rows": [N, K, D]`` of the tokens ``"tokens": [N, K]`` int32, -1 where there are fewer.
* Of the embedding ``"ranks": [N, V, R]`` and ``"up": [N, R, D]``; of the output matrix ``"down": [N, R, D]`` and
  ``"up": [N, R, V]``, and ``"shift": [N, V]``, which is added to the logits.

Where both are one table, an adapter may change either alone.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.models.linear import shifted
from jaxinfer.notation import TENSOR, Array, Bool, Float, Int
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.embedding import embed
from jaxinfer.ops.low_rank import add_up, project_down
from jaxinfer.ops.matmul import product

COPY = "copy_"


def own_embeddings(
    base_BTD: Float[Array, "B T D"], tokens_BT: Int[Array, "B T"], own: Any, ids_B: Int[Array, " B"], backend: Backend
) -> Float[Array, "B T D"]:
    """Return the tokens' embeddings by each row's adapter; rows of a negative id keep their bits."""
    rows_BTD, numbers_B = base_BTD, jnp.maximum(ids_B, 0)
    for has_it_B, table_VD in _copies(own, ids_B):
        rows_BTD = jnp.where(has_it_B[:, None, None], embed(table_VD, tokens_BT, backend), rows_BTD)
    if "rows" in own:
        is_it_BTK = tokens_BT[..., None] == own["tokens"][numbers_B][:, None]
        found_BTD = own["rows"][numbers_B[:, None], jnp.argmax(is_it_BTK, axis=-1)].astype(base_BTD.dtype)
        rows_BTD = jnp.where(is_it_BTK.any(axis=-1, keepdims=True), found_BTD, rows_BTD)
    if "up" in own:
        ranks_NVR, up_NRD = own["ranks"], own["up"]
        inner_BTR = ranks_NVR[numbers_B[:, None], jnp.clip(tokens_BT, 0, ranks_NVR.shape[1] - 1)]
        rows_BTD = add_up(rows_BTD, inner_BTR, up_NRD, ids_B, backend)
    return jnp.where((ids_B < 0)[:, None, None], base_BTD, rows_BTD)


def own_logits(
    base: Float[Array, "*rows V"], hidden: Float[Array, "*rows D"], own: Any, ids_B: Int[Array, " B"], backend: Backend
) -> Float[Array, "*rows V"]:
    """Return the logits by each row's adapter; rows of a negative id keep their bits.

    A whole output matrix is read for all rows if any of them has it, and not if none has.
    """
    lead, (batch, *_) = base.shape[:-1], base.shape
    assert batch == len(ids_B)
    base_BTV, hidden_BTD = (each.reshape(batch, -1, each.shape[-1]) for each in (base, hidden))
    logits_BTV = base_BTV
    for has_it_B, table_VD in _copies(own, ids_B):

        def of_copy(has_it_B: Any, logits_BTV: Any, table_VD: Any) -> Any:
            found_BTV = product(hidden_BTD, table_VD, backend, split=(TENSOR, None))
            return jnp.where(has_it_B[:, None, None], found_BTV.astype(logits_BTV.dtype), logits_BTV)

        operands = has_it_B, logits_BTV, table_VD
        logits_BTV = jax.lax.cond(has_it_B.any(), of_copy, lambda _, logits_BTV, __: logits_BTV, *operands)
    if "rows" in own:
        (found_BTK,) = project_down(hidden_BTD, [own["rows"]], ids_B, backend)
        tokens_BK = own["tokens"][jnp.maximum(ids_B, 0)]
        # What stands past the end is dropped: a negative index would count from there.
        tokens_BK = jnp.where((ids_B[:, None] < 0) | (tokens_BK < 0), logits_BTV.shape[-1], tokens_BK)
        places = jnp.arange(batch)[:, None, None], jnp.arange(logits_BTV.shape[1])[:, None], tokens_BK[:, None]
        logits_BTV = logits_BTV.at[places].set(found_BTK.astype(logits_BTV.dtype), mode="drop")
    if "up" in own:
        (inner,) = project_down(hidden_BTD, [own["down"]], ids_B, backend)
        logits_BTV = add_up(logits_BTV, inner, own["up"], ids_B, backend, TENSOR)
    return shifted(logits_BTV, own, ids_B).reshape(*lead, -1)


def _copies(own: Any, ids_B: Int[Array, " B"]) -> list[tuple[Bool[Array, " B"], Float[Array, "V D"]]]:
    """Return which rows have each of the whole tables, and the tables."""
    if "copy_of" not in own:
        return []
    copy_B = jnp.where(ids_B < 0, -1, own["copy_of"][jnp.maximum(ids_B, 0)])
    numbers = (name.removeprefix(COPY) for name in own if name.startswith(COPY))
    return [(copy_B == int(number), own[COPY + number]) for number in numbers if number.isdecimal()]
