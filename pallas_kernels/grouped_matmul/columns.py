"""The body of `grouped_matmul` for weights in groups, which lie by columns: codes are widened in vector memory.

Few rows: each lies once for every group of a tile of 128 inputs, with zeros for the others, so that one pass through
the matrix unit gives each group's sum in rows of its own, and these sums get the scales: products are exact. Many rows:
weights get their scales first and are rounded to bfloat16.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul.codes import FLOAT4, FLOAT8, INTEGER, LEVELS, TILE, Form, as_float32, in_units
from pallas_kernels.grouped_matmul.levels import one_level, pair_of_levels

# The rows, one for each group of a tile, that pass through the matrix unit in the time of reading a tile of four bits.
_MOST_SPREAD = 64
# Weights are widened so many tiles at a time.
_TILES = 8
# Four bits in the upper part of a bfloat16's mantissa, with the exponent of 16, read as 16 + number.
_SIXTEEN, _MANTISSA, _BIAS = 0x41804180, 0x00780078, 16
# Floats of 4 bits: exponent and upper bit of the mantissa in place, four times too large.
_SIZES, _SIGNS, _FOUR = 0x01C001C0, -0x7FFF8000, 4.0


class Task(NamedTuple):
    """What a kernel does: rows of a block, inputs, what codes stand for, and whether each row lies once for a group."""

    rows: int
    width: int
    form: Form
    kernels: int

    @property
    def parts(self) -> int:
        """The groups of a tile, each of which has rows of its own."""
        return TILE // self.form.group

    @property
    def is_spread(self) -> bool:
        """Whether sums get the scales, not weights."""
        return self.rows * self.parts <= _MOST_SPREAD or self.form.group == TILE

    @property
    def bias(self) -> int:
        """What a widened code is too large by."""
        return self.form.offset + _BIAS if self.form.bits == 4 and self.form.kind == INTEGER else 0

    @property
    def is_shifted(self) -> bool:
        """Whether something is added to all weights of a group."""
        return self.form.is_shifted or bool(self.bias)

    @property
    def tiles(self) -> tuple[int, int]:
        """The number of whole tiles of inputs, and the inputs of the last if it is not whole."""
        return self.width // TILE, self.width % TILE

    def scratch(self, block_f: int) -> list[Any]:
        """Return the vector memory of a step, but for its blocks."""
        whole, rest = self.tiles
        groups = self.width // self.form.group
        totals = pltpu.VMEM((self.kernels, self.rows, block_f), jnp.float32)
        found = [pltpu.VMEM((1 + self.is_shifted, groups, block_f), jnp.float32), totals]
        if not self.is_spread:
            return [*found, *[pltpu.VMEM((self.rows, self.width), jnp.bfloat16)] * (self.form.bits == 4)]
        spread = whole + (rest > 0), self.parts * self.rows, TILE
        return [*found, pltpu.VMEM(spread, jnp.bfloat16), *[pltpu.VMEM(spread, jnp.float32)] * self.is_shifted]

    def scratch_bytes(self, block_f: int) -> int:
        """Return the bytes of `scratch`."""
        return sum(int(np.prod(each.shape)) * jnp.dtype(each.dtype).itemsize for each in self.scratch(block_f))


def columns_body(task: Task, finish: Callable[..., None], num_biases: int) -> Callable[..., None]:
    """Return the body; ``finish(products, biases, out)`` writes what becomes of the sums, ``[R, F]`` in float32."""
    per_kernel = len(task.form.parts)

    def body(_first: Any, _experts: Any, rows: Any, _outputs: Any, x_ref: Any, *refs: Any) -> None:
        orders = refs[: len(choices(task))]
        refs = refs[len(orders) :]
        kernels = [refs[at : at + per_kernel] for at in range(0, task.kernels * per_kernel, per_kernel)]
        biases = refs[task.kernels * per_kernel :][:num_biases]
        out_ref, scale_scr, total_scr, *scratch = refs[task.kernels * per_kernel + num_biases :]
        step = pl.program_id(0)

        @pl.when((step == 0) | (rows[step] != rows[jnp.maximum(step - 1, 0)]))
        def _() -> None:
            if task.is_spread:
                _spread(task, x_ref, orders, *scratch)
            for ref in () if task.is_spread else scratch:
                _reorder(task, x_ref, orders, ref)

        for index, kernel in enumerate(kernels):
            total_ref = total_scr.at[index]
            _set_scales(task, dict(zip(task.form.parts, kernel, strict=True)), scale_scr)
            if task.is_spread:
                _multiply_spread(task, kernel[0], scale_scr, total_ref, *scratch)
            else:
                _multiply_scaled(task, kernel[0], scale_scr, total_ref, *(scratch or [x_ref]))
        products = [total_scr[index] for index in range(task.kernels)]
        finish(products, biases, out_ref)

    return body


def choices(task: Task) -> list[np.ndarray]:
    """Return matrices of ones and zeros that move a tile's inputs to the places of the widened weights."""
    if task.form.bits == 8:
        return []
    whole, rest = task.tiles
    sizes = ([TILE] if whole else []) + ([rest] if rest else [])
    return [np.arange(size)[:, None] == np.array(row_order(size, task.is_spread)) for size in sizes]


def row_order(size: int, in_pairs: bool) -> list[int]:
    """Return which row of a tile of codes of four bits is at each place after it is widened.

    A word holds rows 8w to 8w + 7. Widened ``in_pairs``, each of its halves gives one number per shift: rows 8w + i and
    8w + i + 4.
    """
    words = range(size // 8)
    if in_pairs:
        return [8 * word + index + 4 * half for index in range(4) for word in words for half in range(2)]
    return [8 * word + index for index in range(8) for word in words]


def _over_tiles(task: Task, run: Callable[[Sequence[tuple[Any, int]]], None]) -> None:
    """Run on tiles, some at a time: each is given by its index and its inputs."""
    whole, rest = task.tiles

    def several(index: Any, carry: Any) -> Any:
        run([(index * _TILES + tile, TILE) for tile in range(_TILES)])
        return carry

    looped = whole // _TILES * _TILES if whole > 2 * _TILES else 0
    if looped:
        lax.fori_loop(0, looped // _TILES, several, 0)
    others = [(tile, TILE) for tile in range(looped, whole)] + ([(whole, rest)] if rest else [])
    for start in range(0, len(others), _TILES):
        run(others[start : start + _TILES])


def _inputs(tile: Any, size: int) -> Any:
    """Return the slice of a tile's inputs."""
    return pl.ds(tile * TILE if isinstance(tile, int) else pl.multiple_of(tile * TILE, TILE), size)


def _in_order(x_ref: Any, orders: Any, tile: Any, size: int) -> jax.Array:
    """Return a tile's inputs as weights are widened, in float32."""
    x = x_ref[:, _inputs(tile, size)]
    if not orders:
        return x.astype(jnp.float32)
    # A product with ones and zeros moves lanes exactly.
    return jnp.dot(x, orders[0 if size == TILE else -1][...], preferred_element_type=jnp.float32)


def _reorder(task: Task, x_ref: Any, orders: Any, ordered_ref: Any) -> None:
    def run(tiles: Any) -> None:
        for tile, size in tiles:
            ordered_ref[:, _inputs(tile, size)] = _in_order(x_ref, orders, tile, size).astype(jnp.bfloat16)

    _over_tiles(task, run)


def _spread(task: Task, x_ref: Any, orders: Any, spread_ref: Any, *sums: Any) -> None:
    """Lay out rows as weights are widened; those of several groups apart, and their sums in all lanes."""
    rows, group = task.rows, task.form.group

    def lay_out(tile: Any, size: int) -> None:
        x = _in_order(x_ref, orders, tile, size)
        lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
        # Of four bits, each word of a tile gives two numbers at a time.
        part_of = lax.rem(lane >> 1, size // 8) // (group // 8) if orders else lane // group
        ones = jnp.ones((size, TILE), jnp.bfloat16)
        for part in range(size // group):
            own = (x if group == TILE else jnp.where(part_of == part, x, 0)).astype(jnp.bfloat16)
            spread_ref[tile, pl.ds(part * rows, rows), pl.ds(0, size)] = own
            for ref in sums:
                ref[tile, pl.ds(part * rows, rows)] = jnp.dot(own, ones, preferred_element_type=jnp.float32)

    def run(tiles: Any) -> None:
        for each in tiles:
            lay_out(*each)

    _over_tiles(task, run)


def _set_scales(task: Task, kernel: dict[str, Any], scale_scr: Any) -> None:
    """Write scales, and what is added to a group's widened weights, in float32."""

    def of_groups(name: str, units: str) -> jax.Array:
        numbers = kernel[name][...]
        return in_units(numbers, kernel[units][...]) if units in kernel else as_float32(numbers)

    scales = of_groups("scales", "scale_units")
    if task.form.kind == FLOAT4:
        scales /= _FOUR
    scale_scr[0] = scales
    if task.is_shifted:
        added = -float(task.bias) * scales
        if "zeros" in kernel:
            added -= as_float32(kernel["zeros"][...]) * scales
        if "minima" in kernel:
            added += of_groups("minima", "minima_units")
        scale_scr[1] = added


def _multiply_spread(
    task: Task, codes_ref: Any, scale_scr: Any, total_ref: Any, spread_ref: Any, *sums_ref: Any
) -> None:
    """Add up the sums of groups, each times its scale, and what is added to weights times the sums of inputs."""
    rows, channels = total_ref.shape
    total_ref[...] = jnp.zeros_like(total_ref)

    def add(total: jax.Array, tile: Any, size: int) -> jax.Array:
        parts = size // task.form.group
        x = spread_ref[tile, pl.ds(0, parts * rows), pl.ds(0, size)]
        product = jnp.dot(x, _widen(task, codes_ref, tile, size), preferred_element_type=jnp.float32)
        for part in range(parts):
            group = pl.ds(tile * task.parts + part, 1)
            of_group = product[part * rows : (part + 1) * rows] * scale_scr[0, group]
            for ref in sums_ref:
                sums = jnp.concatenate([ref[tile, pl.ds(part * rows, rows)]] * (channels // TILE), axis=1)
                of_group += sums * scale_scr[1, group]
            total += of_group
        return total

    def run(tiles: Any) -> None:
        total_ref[...] = functools.reduce(lambda total, each: add(total, *each), tiles, total_ref[...])

    _over_tiles(task, run)


def _multiply_scaled(task: Task, codes_ref: Any, scale_scr: Any, total_ref: Any, x_ref: Any) -> None:
    """Multiply by weights that get their scales, and are rounded to bfloat16, first."""
    total_ref[...] = jnp.zeros_like(total_ref)

    def weights(tile: Any, size: int) -> jax.Array:
        numbers = _numbers(task, codes_ref, tile, size)
        parts = size // task.form.group

        def of_rows(which: int) -> jax.Array:
            """Return a number for each row of a piece, which has as many rows of each group."""
            each = [scale_scr[which, pl.ds(tile * task.parts + part, 1)] for part in range(parts)]
            rows = numbers[0].shape[0] // parts
            return jnp.concatenate([jnp.broadcast_to(one, (rows, one.shape[1])) for one in each], axis=0)

        scales = of_rows(0)
        pieces = [piece * scales for piece in numbers]
        if task.is_shifted:
            added = of_rows(1)
            pieces = [piece + added for piece in pieces]
        return jnp.concatenate(pieces, axis=0).astype(jnp.bfloat16)

    def run(tiles: Any) -> None:
        for tile, size in tiles:
            x = x_ref[:, _inputs(tile, size)]
            total_ref[...] += jnp.dot(x, weights(tile, size), preferred_element_type=jnp.float32)

    _over_tiles(task, run)


def _numbers(task: Task, codes_ref: Any, tile: Any, size: int) -> list[jax.Array]:
    """Return what a tile's codes stand for, before scales, in float32, one of eight rows in each piece."""
    if task.form.bits == 8:
        return [_widen(task, codes_ref, tile, size).astype(jnp.float32)]
    words = pltpu.bitcast(codes_ref[_inputs(tile, size)], jnp.int32)
    number = {FLOAT4: one_float, LEVELS: functools.partial(one_level, task.form.levels)}.get(task.form.kind)
    return [(number or _one_integer)(words, index) for index in range(8)]


def _one_integer(words: jax.Array, index: int) -> jax.Array:
    """Return one of the eight numbers of each word, too large by 16."""
    bits = (_shifted(words, 19 - 4 * index) & 0x00780000) | 0x41800000
    return lax.bitcast_convert_type(bits, jnp.float32)


def one_float(words: jax.Array, index: int) -> jax.Array:
    """Return one of the eight floats of each word, four times as large."""
    sizes = _shifted(words, 22 - 4 * index) & 0x01C00000
    # 0 and 0.5 have no exponent.
    found = jnp.where(sizes < 0x00800000, sizes << 8, sizes + 0x40000000)
    return lax.bitcast_convert_type(found | (_shifted(words, 28 - 4 * index) & -0x80000000), jnp.float32)


def _widen(task: Task, codes_ref: Any, tile: Any, size: int) -> jax.Array:
    """Return a tile's codes in bfloat16; those of four bits in the order of `row_order`."""
    codes = codes_ref[_inputs(tile, size)]
    if task.form.kind == FLOAT8:
        return float8_to_bfloat16(codes)
    if task.form.bits == 8:
        return codes.astype(jnp.bfloat16)
    words = pltpu.bitcast(codes, jnp.int32)
    kinds = {FLOAT4: pair_of_floats, LEVELS: functools.partial(pair_of_levels, task.form.levels)}
    widen = kinds.get(task.form.kind, _widen_integers)
    return jnp.concatenate([pltpu.bitcast(widen(words, index), jnp.bfloat16) for index in range(4)], axis=0)


def float8_to_bfloat16(codes: jax.Array) -> jax.Array:
    """Return floats of 8 bits, given as bytes."""
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.bfloat16)


def _shifted(words: jax.Array, left: int) -> jax.Array:
    return words << left if left >= 0 else lax.shift_right_logical(words, jnp.full_like(words, -left))


def _widen_integers(words: jax.Array, index: int) -> jax.Array:
    """Return the number ``index`` of both halves of each word, as bfloat16 numbers too large by 16."""
    return (_shifted(words, 3 - 4 * index) & _MANTISSA) | _SIXTEEN


def pair_of_floats(words: jax.Array, index: int) -> jax.Array:
    """Return the float ``index`` of both halves of each word as a bfloat16 four times as large; zero is 2^-124.

    With two bits of exponent and one of mantissa in place, the exponent of 1 or more has its highest bit set. That of
    0.5 has none, and its bit of the mantissa must become that exponent's; what carries says which it is.
    """
    sizes = _shifted(words, 6 - 4 * index) & _SIZES
    has_exponent = (sizes + 0x01800180) & 0x02000200
    found = (sizes + lax.shift_right_logical(has_exponent, jnp.full_like(words, 3)) + 0x3FC03FC0) & 0x41C041C0
    return found | (_shifted(words, 12 - 4 * index) & _SIGNS)
