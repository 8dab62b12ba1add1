"""How tokens reach their experts where a mesh's axis `expert` splits the rows too: two exchanges, chosen by bytes.

*Gather*: every device gets all tokens, computes its own experts' part of every sum, and a reduce-scatter adds the parts
up. *All-to-all*: each copy of a token goes to the device of its expert, and one row comes back for each copy. A device
of n, with N tokens of C copies each, sends (n - 1) N rows each way in the first, and about C N (n - 1) / n in the
second: where C is well under n that is less. It takes one collective more, of the numbers of copies, and a few passes
over them, so a few tokens are gathered all the same.

No token is dropped: there is room for all copies on every device, and on TPUs only rows that there are are sent
(`jax.lax.ragged_all_to_all`). Copies for one expert lie side by side on the sender and land where the expert's blocks
begin, so that nothing but rows and their numbers is sent. Elsewhere chunks are filled up to the most that there can be.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.backend import Backend, Exchange
from jaxinfer.ops.quantized_sums import splits_into_blocks

# The bytes of a pass and layer that an all-to-all has to save. A link of a v5e sends them in 20 microseconds, which is
# about what a small collective and the moves of rows before and after take.
_PAYS = 1 << 20


class Chunks(NamedTuple):
    """Rows of one sender for one expert: where they begin there, how many they are, and where they land.

    Each has an entry for every device and expert of it, in this order.
    """

    begin: Int[Array, " X"]
    sizes: Int[Array, " X"]
    land: Int[Array, " X"]


class Routes(NamedTuple):
    """The chunks that this device sends to experts, and those that it gets; and its experts' blocks.

    ``sorted_Y`` are the tokens of all copies, expert by expert, and ``places_NC`` where each copy stands among them.
    """

    sent: Chunks
    received: Chunks
    sorted_Y: Int[Array, " Y"]
    places_NC: Int[Array, "N C"]
    experts: Int[Array, " X"]
    count: Int[Array, ""]


def choose_exchange(num_tokens: int, per_token: int, model_dim: int, devices: int, backend: Backend) -> Exchange:
    """Return how tokens, so many on each device, reach their experts, each as many as ``per_token``."""
    if backend.exchange is not None:
        return backend.exchange
    there, rows = jnp.dtype(backend.compute_dtype).itemsize, (devices - 1) * num_tokens * model_dim
    # Back in float32, or sums in bytes.
    in_bytes = backend.collectives == "int8" and splits_into_blocks(model_dim, devices)
    gathered = rows * (there + (1 if in_bytes else 4))
    by_copies = rows * per_token / devices * (there + 4)
    # CPU devices share a memory, and their chunks are filled up.
    is_less = backend.platform == "tpu" and gathered - by_copies >= _PAYS
    return "all_to_all" if is_less else "gather"


def gather_tokens(
    inputs_ND: Float[Array, "N D"], chosen_NC: Int[Array, "N C"], weights_NC: Float[Array, "N C"], axis: str
) -> tuple[Array, Array, Array]:
    """Return the tokens of all devices, and what they chose, in the order of the devices."""
    inputs_ND = lax.all_gather(inputs_ND, axis, tiled=True)
    if weights_NC.dtype != jnp.float32:
        return inputs_ND, *(lax.all_gather(each, axis, tiled=True) for each in (chosen_NC, weights_NC))
    # In one small gather: each waits for its links.
    both = jnp.concatenate([chosen_NC, lax.bitcast_convert_type(weights_NC, jnp.int32)], axis=1)
    chosen_NC, codes_NC = jnp.split(lax.all_gather(both, axis, tiled=True), 2, axis=1)
    return inputs_ND, chosen_NC, lax.bitcast_convert_type(codes_NC, jnp.float32)


def plan_routes(chosen_NC: Int[Array, "N C"], own: int, rows: int, axis: str, devices: int) -> Routes:
    """Return where copies go on devices that have ``own`` experts each, in blocks of ``rows`` rows."""
    num_tokens, per_token = chosen_NC.shape
    pairs = num_tokens * per_token
    order_Y = jnp.argsort(chosen_NC.reshape(-1), stable=True)
    sorted_Y = (order_Y // per_token).astype(jnp.int32)
    places_NC = jnp.zeros((pairs,), jnp.int32).at[order_Y].set(jnp.arange(pairs, dtype=jnp.int32))
    counts_E = jnp.zeros((devices * own,), jnp.int32).at[chosen_NC.reshape(-1)].add(1)
    # Of each sender (a row) for each expert (a column).
    counts_SE = lax.all_gather(counts_E, axis)
    begin_SE = jnp.cumsum(counts_SE, axis=1, dtype=jnp.int32) - counts_SE
    before_SE = jnp.cumsum(counts_SE, axis=0, dtype=jnp.int32) - counts_SE
    blocks_DE = ((jnp.sum(counts_SE, axis=0, dtype=jnp.int32) + rows - 1) // rows).reshape(devices, own)
    ends_DE = jnp.cumsum(blocks_DE, axis=1, dtype=jnp.int32)
    land_SE = before_SE + ((ends_DE - blocks_DE) * rows).reshape(-1)
    here = lax.axis_index(axis)

    def mine(array_SE: Array) -> Array:
        return lax.dynamic_index_in_dim(array_SE, here, keepdims=False)

    def for_mine(array_SE: Array) -> Array:
        return lax.dynamic_slice_in_dim(array_SE, here * own, own, axis=1).reshape(-1)

    ends_E = mine(ends_DE)
    most = pairs * devices
    most = (most + min(own, most) * (rows - 1)) // rows
    experts = jnp.minimum(jnp.searchsorted(ends_E, jnp.arange(most, dtype=jnp.int32), side="right"), own - 1)
    return Routes(
        Chunks(*map(mine, (begin_SE, counts_SE, land_SE))),
        Chunks(*map(for_mine, (begin_SE, counts_SE, land_SE))),
        sorted_Y,
        places_NC.reshape(num_tokens, per_token),
        experts.astype(jnp.int32),
        ends_E[-1],
    )


def to_experts(
    inputs_ND: Float[Array, "N D"], routes: Routes, num_rows: int, axis: str, backend: Backend
) -> Float[Array, "rows D"]:
    """Send each copy to its expert's device; return the rows of this one's blocks, ``num_rows`` with what fills up."""
    copies_YD = inputs_ND[routes.sorted_Y]
    return _send(copies_YD, num_rows, len(copies_YD), routes.sent, routes.received, axis, backend)


def from_experts(
    results_YD: Float[Array, "rows D"], routes: Routes, axis: str, backend: Backend
) -> Float[Array, "copies D"]:
    """Send what experts return back, and return that of this device's copies, in the order of ``routes.sorted_Y``."""
    there = Chunks(routes.received.land, routes.received.sizes, routes.received.begin)
    back = Chunks(routes.sent.land, routes.sent.sizes, routes.sent.begin)
    pairs = len(routes.sorted_Y)
    return _send(results_YD, pairs, pairs, there, back, axis, backend)


def _send(
    rows_YD: Array, num_rows: int, most: int, sent: Chunks, received: Chunks, axis: str, backend: Backend
) -> Array:
    """Exchange chunks, of which a device has at most ``most`` rows for another; where nothing lands are zeros."""
    width = rows_YD.shape[1]
    if backend.platform == "tpu":
        nothing = jnp.zeros((num_rows, width), rows_YD.dtype)
        return lax.ragged_all_to_all(
            rows_YD, nothing, sent.begin, sent.sizes, sent.land, received.sizes, axis_name=axis
        )
    devices = lax.axis_size(axis)

    def rows_of(chunks: Chunks, starts: Array, otherwise: int) -> Array:
        """Return the row of each place of each device's chunks, laid side by side and filled up."""
        sizes_DK, starts_DK = chunks.sizes.reshape(devices, -1), starts.reshape(devices, -1)
        ends_DK = jnp.cumsum(sizes_DK, axis=1)
        place_M = jnp.arange(most, dtype=jnp.int32)
        chunk_DM = jnp.sum(place_M[None, :, None] >= ends_DK[:, None], axis=-1)
        among_DM = jnp.minimum(chunk_DM, sizes_DK.shape[1] - 1)
        first_DM, start_DM = (jnp.take_along_axis(each, among_DM, 1) for each in (ends_DK - sizes_DK, starts_DK))
        return jnp.where(chunk_DM == sizes_DK.shape[1], otherwise, start_DM + place_M - first_DM).reshape(-1)

    filled_DMD = rows_YD.at[rows_of(sent, sent.begin, len(rows_YD))].get(mode="fill", fill_value=0)
    arrived_DMD = lax.all_to_all(filled_DMD, axis, 0, 0, tiled=True)
    landed = rows_of(received, received.land, num_rows)
    return jnp.zeros((num_rows, width), rows_YD.dtype).at[landed].set(arrived_DMD, mode="drop")
