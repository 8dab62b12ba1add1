"""Attention within a long prompt whose tokens are split over the mesh's axis ``sequence``.

Keys and values go around a ring of devices (Liu et al., 2310.01889). At every turn each device attends to the part that
it holds, and results are joined by their log-sum-exp. With n devices, the prompt has 2n parts. Each device gets two of
them, the i-th from the front and the i-th from the back, so that all have equally many pairs of a token and an earlier
one (as in zigzag or striped rings, Brandon et al., 2311.09431). Every turn then has two products of a part by a part,
whichever parts these are.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxinfer.notation import SEQUENCE, TENSOR, Array, Float, Int, Num
from jaxinfer.ops.attention import Partial, attend_partially, values_of
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cache_write import as_rows
from jaxinfer.ops.each_device import rows_axis
from jaxinfer.ops.kernel_choice import choose_means
from jaxinfer.ops.masks import in_window
from jaxinfer.ops.rows_in_bytes import holds_bytes
from jaxinfer.ops.split_slots import on_one_device
from pallas_kernels.window import Chunk, Window

# Without a kernel, only this many queries' scores are held at a time.
_QUERY_BLOCK = 512
# The tokens of a kernel's block. For fewer tokens, XLA can hold all scores.
_KERNEL_TILE = 128


def goes_around(num_tokens: int, backend: Backend) -> bool:
    """Tell whether a prompt splits into two parts for each of several devices, where its slots are not gathered."""
    return backend.slot_shards > 1 and not backend.keeps_bits and num_tokens % (2 * backend.slot_shards) == 0


def ring_order(num_tokens: int, backend: Backend) -> np.ndarray:
    """Return the token at each place of the ring: each device's two parts, one device after another."""
    parts = np.arange(num_tokens, dtype=np.int32).reshape(2 * backend.slot_shards, -1)
    front, back = np.split(parts, 2)
    return np.concatenate([front, back[::-1]], axis=1).reshape(-1)


def in_text_order(hidden_BTD: Float[Array, "B T D"], backend: Backend) -> Float[Array, "B T D"]:
    """Reorder the results of a prompt's tokens from ring order to sequence order."""
    spec = PartitionSpec(rows_axis(hidden_BTD.shape[0], backend), SEQUENCE, None)
    return backend.on_devices(_Ring(backend.slot_shards).put_in_order, spec, spec)(hidden_BTD)


def attend_around_ring(
    query_BTNH: Float[Array, "B T N H"],
    keys_LBSF: Num[Array, "L B S F"],
    values_LBSF: Num[Array, "L B S _"],
    keys_BTKH: Float[Array, "B T K H"],
    values_BTKH: Float[Array, "B T K H"],
    layer: Int[Array, ""] | int,
    scale: float,
    backend: Backend,
    *,
    softcap: float | None = None,
    window: Window | None = None,
    sink_logits_N: Float[Array, " N"] | None = None,
) -> tuple[Float[Array, "B T N H"], Num[Array, "L B S F"], Num[Array, "L B S _"]]:
    """Attend within prompts that start in slot 0 of a cache with split slots, and write one layer of it.

    Tokens are in `ring_order`. Each device keeps the tokens of its own slots as they pass by on the ring. Slots past
    the prompt, which are still empty, are overwritten too. Results past a row's length are meaningless.
    """
    num_kv_heads = keys_BTKH.shape[2] // backend.kv_shards
    is_tiled = query_BTNH.shape[1] // (2 * backend.slot_shards) % _KERNEL_TILE == 0
    by_kernel = is_tiled and choose_means(backend, keys_LBSF) == "kernel" and not holds_bytes(keys_LBSF.dtype)
    # The kernel knows how far apart two parts are, but not where chunks begin in them.
    by_kernel = by_kernel and not isinstance(window, Chunk)
    rule = _Rule(scale, softcap, window, num_kv_heads, on_one_device(backend), by_kernel)

    def run(query: Any, keys: Any, values: Any, new_keys: Any, new_values: Any, layer: Any, logits_N: Any) -> Any:
        ring = _Ring(backend.slot_shards)
        mixed, rows = ring.attend(query, (new_keys, new_values), keys.shape[2], rule, logits_N)
        held = (lax.dynamic_update_slice(old, new[None], (layer, 0, 0, 0)) for old, new in zip((keys, values), rows))
        return mixed.astype(backend.compute_dtype), *held

    rows = rows_axis(query_BTNH.shape[0], backend)
    heads, lanes = PartitionSpec(rows, SEQUENCE, TENSOR, None), PartitionSpec(rows, SEQUENCE, TENSOR)
    cache = PartitionSpec(None, rows, SEQUENCE, TENSOR)
    new = as_rows(keys_BTKH, keys_LBSF, backend), as_rows(values_BTKH, values_LBSF, backend)
    specs = heads, cache, cache, lanes, lanes, PartitionSpec(), PartitionSpec(TENSOR)
    run = backend.on_devices(run, specs, (heads, cache, cache))
    return run(query_BTNH, keys_LBSF, values_LBSF, *new, jnp.asarray(layer, jnp.int32), sink_logits_N)


@dataclass(frozen=True)
class _Rule:
    """The settings for attention from one part of the prompt to another."""

    scale: float
    softcap: float | None
    window: Window | None
    num_kv_heads: int
    backend: Backend
    by_kernel: bool

    def attend(self, query_BTNH: jax.Array, held: "_Held", first: Any, distance: Any) -> Partial:
        """Attend to keys from position ``first`` on; the queries start ``distance`` positions after them."""
        if self.by_kernel:
            # Imported here: a CPU need not wait for Pallas.
            from pallas_kernels.flash_prefill.op import attend_block

            interpret = self.backend.kernels == "interpret"
            options: dict[str, Any] = {"num_kv_heads": self.num_kv_heads, "scale": self.scale, "interpret": interpret}
            query_BTNH = query_BTNH.astype(held.keys_BTF.dtype)
            held = held._replace(values_BTF=values_of(*held))
            mixed_BTNH, logsumexp_BTN = attend_block(
                query_BTNH, *held, distance, softcap=self.softcap, window=self.window, **options
            )
            return Partial(mixed_BTNH.astype(jnp.float32), logsumexp_BTN, jnp.ones_like(logsumexp_BTN))
        num_tokens = query_BTNH.shape[1]
        if num_tokens <= _QUERY_BLOCK or num_tokens % _QUERY_BLOCK:
            return self._attend(query_BTNH, held, first, distance)
        count = num_tokens // _QUERY_BLOCK
        blocks = jnp.moveaxis(query_BTNH.reshape(query_BTNH.shape[0], count, _QUERY_BLOCK, *query_BTNH.shape[2:]), 1, 0)
        starts = jnp.arange(count, dtype=jnp.int32) * _QUERY_BLOCK
        found = lax.map(lambda block: self._attend(block[0], held, first, distance + block[1]), (blocks, starts))
        return jax.tree.map(
            lambda part: jnp.moveaxis(part, 0, 1).reshape(part.shape[1], num_tokens, *part.shape[3:]), found
        )

    def _attend(self, query_BTNH: jax.Array, held: "_Held", first: Any, distance: Any) -> Partial:
        query_1T = first + distance + jnp.arange(query_BTNH.shape[1])[None]
        key_1T = first + jnp.arange(held.keys_BTF.shape[1])[None]
        mask_1TT = (key_1T[:, None, :] <= query_1T[:, :, None]) & in_window(query_1T, key_1T, self.window)
        return attend_partially(query_BTNH, *held, mask_1TT, self.scale, self.backend, self.softcap, self.num_kv_heads)


class _Held(NamedTuple):
    """Keys and values of one part of the prompt."""

    keys_BTF: Any
    values_BTF: Any


class _Parts(NamedTuple):
    """A device's two parts of the prompt: one from the front, one from the back."""

    front: Any
    back: Any


@dataclass(frozen=True)
class _Ring:
    """A ring of ``num_devices`` devices, from the view of one of them."""

    num_devices: int

    def attend(
        self,
        query_BTNH: jax.Array,
        new: tuple[jax.Array, jax.Array],
        num_slots: int,
        rule: _Rule,
        sink_logits_N: jax.Array | None = None,
    ) -> tuple[jax.Array, _Held]:
        """Return this device's attention results, and the keys and values of its ``num_slots`` slots."""
        query = _Parts(*jnp.split(query_BTNH, 2, axis=1))
        held = _Parts(*(_Held(*pair) for pair in zip(*(jnp.split(each, 2, axis=1) for each in new))))
        front = rule.attend(query.front, held.front, lax.axis_index(SEQUENCE) * query.front.shape[1], 0)
        slots = _Slots.empty(held.front, num_slots)
        found = _Found(front, front.none(), slots.padded)

        def advance(turn: Any, carry: tuple[_Parts, _Found]) -> tuple[_Parts, _Found]:
            held, found = carry
            # Sent first, so that it travels while this device computes.
            coming = self._passed_on(held)
            return coming, self._take_turn(turn, query, held, found, rule)

        held, found = lax.fori_loop(0, self.num_devices - 1, advance, (held, found))
        found = self._take_turn(self.num_devices - 1, query, held, found, rule)
        means = (part.with_sinks(sink_logits_N).mean_BTNH() for part in (found.front, found.back))
        mixed_BTNH = jnp.concatenate(list(means), axis=1)
        return mixed_BTNH, _Slots(found.padded, slots.margin).held

    def _take_turn(self, turn: Any, query: _Parts, held: _Parts, found: "_Found", rule: _Rule) -> "_Found":
        """Write the part that is held, and attend to it as far as it comes before this device's own parts."""
        count, place, origin = self.num_devices, lax.axis_index(SEQUENCE), self._origin(turn)
        size = query.front.shape[1]
        slots = _Slots(found.padded, size)
        for part, number in zip(held, (origin, 2 * count - 1 - origin)):
            slots = slots.with_part(part, number * size - place * slots.num_slots)
        # The front part that is held always comes before this device's back part.
        distance, last = (2 * count - 1 - place - origin) * size, 2 * count - 1 - origin
        back = found.back.joined_with(rule.attend(query.back, held.front, origin * size, distance))
        # It also comes before this device's front part, or else the held back part is not after this device's back
        # part.
        is_before = origin < place
        mine, theirs = _where(is_before, query.front, query.back), _where(is_before, held.front, held.back)
        first = jnp.where(is_before, origin, last) * size
        more = rule.attend(mine, theirs, first, jnp.abs(place - origin) * size)
        joined = _where(is_before, found.front, back).joined_with(more)
        return _Found(_where(is_before, joined, found.front), _where(is_before, back, joined), slots.padded)

    @property
    def _order(self) -> list[int]:
        """Return the devices in the order of the ring; neighbours are at most two apart.

        The devices of an axis often form a line with distant ends. A TPU sends to a far device before or after it
        computes, but to a near one at the same time.
        """
        there, back = range(0, self.num_devices, 2), range(1, self.num_devices, 2)
        return [*there, *reversed(back)]

    def _origin(self, turn: Any) -> jax.Array:
        """Return the device whose parts this device holds after ``turn`` turns."""
        order = jnp.array(self._order)
        return order[(jnp.argsort(order)[lax.axis_index(SEQUENCE)] - turn) % self.num_devices]

    def _passed_on(self, held: Any) -> Any:
        order = self._order
        return self._sent(held, list(zip(order, order[1:] + order[:1])))

    def put_in_order(self, tokens_BTX: jax.Array) -> jax.Array:
        """Exchange this device's front and back part for two consecutive parts.

        One of them has an even number, the other an odd number; each device gets one of each.
        """
        front, back = jnp.split(tokens_BTX, 2, axis=1)
        is_even = lax.axis_index(SEQUENCE) % 2 == 0
        last = 2 * self.num_devices - 1
        parts = []
        for parity, mine in enumerate((_where(is_even, front, back), _where(is_even, back, front))):
            numbers = range(parity, last + 1, 2)
            parts.append(self._sent(mine, [(min(number, last - number), number // 2) for number in numbers]))
        return jnp.concatenate(parts, axis=1)

    def _sent(self, tree: Any, route: list[tuple[int, int]]) -> Any:
        return jax.tree.map(partial(lax.ppermute, axis_name=SEQUENCE, perm=route), tree)


class _Found(NamedTuple):
    """The attention results of a device's two parts, and its filled slots, so far."""

    front: Partial
    back: Partial
    padded: _Held


class _Slots(NamedTuple):
    """A device's slots of one layer, filled part by part, with margins that take the slots of other devices."""

    padded: _Held
    margin: int

    @classmethod
    def empty(cls, part: _Held, num_slots: int) -> "_Slots":
        """Return slots of zeros for parts of this size."""
        batch, margin, lanes = part.keys_BTF.shape
        zeros = jnp.zeros((batch, num_slots + 2 * margin, lanes), part.keys_BTF.dtype)
        return cls(_Held(zeros, zeros), margin)

    def with_part(self, part: _Held, start: Any) -> "_Slots":
        """Return the slots with a part whose first token goes to slot ``start``, which may be outside."""
        at = jnp.clip(start + self.margin, 0, self.padded.keys_BTF.shape[1] - self.margin)
        filled = (lax.dynamic_update_slice_in_dim(*pair, at, axis=1) for pair in zip(self.padded, part))
        return self._replace(padded=_Held(*filled))

    @property
    def num_slots(self) -> int:
        """The number of slots between the margins."""
        return self.padded.keys_BTF.shape[1] - 2 * self.margin

    @property
    def held(self) -> _Held:
        """The slots without the margins."""
        return _Held(*(each[:, self.margin : -self.margin] for each in self.padded))


def _where(condition: Any, one: Any, other: Any) -> Any:
    return jax.tree.map(partial(jnp.where, condition), one, other)
