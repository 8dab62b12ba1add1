"""A layer of experts by a TPU's grouped product (`pallas_kernels.grouped_matmul`), which reads an expert once.

Copies of tokens are laid out as in `jaxinfer.ops.experts`, and a kernel goes over all of their blocks. A token's
experts are added up the best one first. The order of a sum over features depends on their number alone, with plain
kernels and with a scale for each channel: what a token gets does not depend on the tokens beside it. With scales of
groups it depends on the rows of a block too, and so on the number of tokens: in blocks of few rows sums get the scales,
in larger ones weights do, and are rounded.
"""

import operator
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops import low_rank
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.column_products import codes_of
from jaxinfer.ops.few_bits.columns import ColumnArray
from jaxinfer.ops.few_bits.formats import FP8, INT8
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.ops.layer_view import LayerView
from jaxinfer.ops.rounding import rounded

# Of a block: the matrix unit takes 128 rows in the time in which it takes a kernel's next tile.
_MOST_ROWS = 128
# Of a block with weights in few bits, of which each expert should have one.
_FEW_ROWS = 32
# The bytes of rows that are gathered at once to be added up, and of how many tokens if there are more.
_MOST_GATHERED, _TOKENS = 64 << 20, 256
_DTYPES = ("bfloat16", "float32")
# Of inputs in few bits, so many lie in whole tiles of vector memory.
_UNIT = 64


class Load(NamedTuple):
    """How many experts a device has, of how many, and how many of them each of its tokens goes to."""

    own: int
    experts: int
    per_token: int
    tokens: int

    @property
    def is_split(self) -> bool:
        """Whether there are experts on other devices."""
        return self.own < self.experts

    def expected(self, rows: int) -> tuple[float, float]:
        """Return how many experts are read, and how many rows, in blocks of so many, if all are equally likely."""
        share = self.per_token / self.experts
        read = self.own * (1 - (1 - share) ** self.tokens)
        return read, self.own * share * self.tokens + read * (rows - 1) / 2


class OwnCopies(NamedTuple):
    """The number of each row's own pair in the expert of its block, negative for none, and the pairs of the kernels.

    These are as `jaxinfer.ops.experts.OwnPairs` has them; tokens have ``different`` numbers at the most.
    """

    ids_Y: Int[Array, " Y"]
    pairs: Any
    different: int


def multiplies_grouped(kernels: Any, backend: Backend) -> bool:
    """Whether the grouped product serves these kernels: a TPU's, in its compute dtype, or in bits that it widens."""
    gate, up, down = (kernel.stack if isinstance(kernel, LayerView) else kernel for kernel in kernels)
    dtype = backend.compute_dtype

    def serves(stack: Any) -> bool:
        if not isinstance(stack, QuantizedArray):
            return hasattr(stack, "dtype") and stack.dtype == dtype and dtype in _DTYPES
        is_widened = isinstance(stack, ColumnArray) or stack.form in (INT8, FP8)
        return dtype == "bfloat16" and is_widened and stack.shape[-1] % _UNIT == 0

    form, other = (getattr(stack, "form", None) for stack in (gate, up))
    return backend.kernels != "xla" and form == other and all(map(serves, (gate, up, down)))


def grouped_rows(mean: float, kernels: Any, dtype: Any) -> int:
    """Return the rows of a block: about as many as an expert gets, ``mean``; 0 if a chip has no room for a block.

    ``kernels`` are gate, up and down.
    """
    from pallas_kernels.grouped_matmul import fit_rows

    stacks = [_operand(kernel.stack if isinstance(kernel, LayerView) else kernel) for kernel in kernels]
    forms = [getattr(stack, "form", None) for stack in stacks]
    if any(forms):
        # Widening codes again for a second block takes longer than multiplying a larger block.
        mean = max(mean, min(2 * mean, _FEW_ROWS))
    rows = 1
    while rows < min(mean, _MOST_ROWS):
        rows *= 2
    item, (_, up, down) = jnp.dtype(dtype).itemsize, kernels
    wide = fit_rows(rows, up.shape[-1], 2, item, form=forms[1])
    return min(wide, fit_rows(rows, down.shape[-1], 1, item, form=forms[2]))


def multiplies_pairs(kernels: Any, pairs: Any, backend: Backend) -> bool:
    """Whether a TPU's kernel reads those of experts' pairs that rows have: vector memory has room.

    The kernels' references read all.
    """
    if backend.kernels == "reference":
        return True
    widths = [kernel.shape[-1] for kernel in kernels]
    rank = max(pair[0].shape[-2] for pair in pairs if pair is not None)

    def fits(down: Any, up: Any, width: int) -> bool:
        # Gate and up are multiplied at once.
        of_down = [low_rank.joined(down)] * 2
        return low_rank.has_kernels((_MOST_ROWS, 1, width), of_down, backend) and low_rank.has_kernels(
            (_MOST_ROWS, 1, rank), [low_rank.joined(up)], backend
        )

    return all(fits(pair[0], pair[1], width) for pair, width in zip(pairs, widths) if pair is not None)


def apply_grouped(
    inputs_ND: Float[Array, "N D"],
    blocks: Any,
    weights_NC: Float[Array, "N C"],
    kernels: Any,
    biases: Any,
    gating: Any,
    load: Load,
    backend: Backend,
    own: OwnCopies | None = None,
) -> Float[Array, "N D"]:
    """Return each token's sum over its experts, in float32; ``blocks`` are as `jaxinfer.ops.experts` lays them out."""
    # What fills up a block is multiplied and left out: of any token, and so of no time to blank it.
    copies_YD = inputs_ND.astype(backend.compute_dtype).at[blocks.tokens].get(mode="clip")
    results_YD = multiply_grouped(copies_YD, blocks.experts, blocks.count, kernels, biases, gating, load, backend, own)
    return add_up(results_YD, blocks.places_NC, weights_NC, load.is_split)


def multiply_grouped(
    copies_YD: Float[Array, "Y D"],
    experts: Int[Array, " X"],
    count: Int[Array, ""],
    kernels: Any,
    biases: Any,
    gating: Any,
    load: Load,
    backend: Backend,
    own: OwnCopies | None = None,
) -> Float[Array, "Y D"]:
    """Return what experts make of the rows of their blocks, of which the first ``count`` are run, in float32.

    Rows' own pairs stand between the kernels: then gate and up are products of their own, and so is what combines them.
    """
    # Imported here: a program that is kept already starts without the kernels.
    from pallas_kernels.grouped_matmul import grouped_matmul
    from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference

    stacks, firsts = zip(*(_flat(kernel) for kernel in kernels))
    dtype = jnp.dtype(backend.compute_dtype)
    stacks = [_operand(stack) for stack in stacks]
    options = {"rounded_to": dtype, "first_expert": firsts[0]}
    read = load.expected(len(copies_YD) // len(experts))
    run: Any = partial(grouped_matmul, interpret=backend.kernels == "interpret", read=read)
    run = grouped_matmul_reference if backend.kernels == "reference" else run
    if own is not None:
        products = partial(_with_pairs, own=own, experts=experts, load=load, backend=backend)
        each = (partial(run, kernels=[stack], experts_X=experts, count=count, **options) for stack in stacks)
        gate, up, down = (partial(one, biases=bias) for one, bias in zip(each, _apart(biases)))
        gate_YF, up_YF = products([gate, up], copies_YD, own.pairs[:2], dtype)
        # In float32 and rounded once, as the product of all rows combines them: rows without a pair keep their bits.
        inner_YF = gating(gate_YF.astype(jnp.float32), up_YF.astype(jnp.float32)).astype(dtype)
        return products([down], inner_YF, own.pairs[2:], jnp.float32)[0]
    wide, narrow = (None, None) if biases is None else (biases[:2], biases[2:])
    of_rows = experts, count
    inner_YF = run(copies_YD, stacks[:2], *of_rows, biases=wide, combine=gating, out_dtype=dtype, **options)
    return run(inner_YF, stacks[2:], *of_rows, biases=narrow, out_dtype=jnp.float32, **options)


def _apart(biases: Any) -> list[Any]:
    return [None] * 3 if biases is None else [[each] for each in biases]


def _with_pairs(
    products: Any, rows_YF: Any, pairs: Any, dtype: Any, own: OwnCopies, experts: Any, load: Load, backend: Backend
) -> list[Any]:
    """Return products of rows with experts' kernels, and with the rows' own pairs of these."""
    alone, rows = replace(backend, mesh=None), len(rows_YF) // len(experts)
    results = [run(rows_YF, out_dtype=dtype) for run in products]
    there = [pair for pair in pairs if pair is not None]
    if not there:
        return results
    number = there[0][0].shape[1]
    ids_Y = jnp.where(own.ids_Y < 0, -1, jnp.repeat(experts, rows) * number + own.ids_Y)
    different = min(own.different, number)
    bounds = low_rank.Bounds(
        min(load.tokens * load.per_token, load.own * different, len(rows_YF)), (rows, min(rows, different))
    )
    downs = [low_rank.joined(down) for down, _ in there]
    inner = iter(low_rank.project_down(rows_YF[:, None], downs, ids_Y, alone, bounds=bounds))
    return [
        base
        if pair is None
        else low_rank.add_up(base[:, None], next(inner), low_rank.joined(pair[1]), ids_Y, alone, bounds=bounds)[:, 0]
        for base, pair in zip(results, pairs)
    ]


def add_up(
    results_YD: Float[Array, "Y D"], places_NC: Int[Array, "N C"], weights_NC: Float[Array, "N C"], is_split: bool
) -> Float[Array, "N D"]:
    """Return each token's weighted sum of the rows at its places, in their order; past the last are none.

    Many tokens' rows are added up a few hundred tokens at a time, and where devices have parts of the experts (which
    is only a matter of speed) beginning with the tokens that have most rows.
    """
    (num_tokens, per_token), (num_rows, model_dim) = places_NC.shape, results_YD.shape

    def weighted(places: Array, weights: Array) -> Array:
        rows = results_YD.at[places].get(mode="clip")
        return rounded(rows * weights[..., None].astype(rows.dtype))

    has_row_NC = places_NC < num_rows
    if num_tokens * per_token * model_dim * results_YD.dtype.itemsize <= _MOST_GATHERED:
        products_NCD = jnp.where(has_row_NC[..., None], weighted(places_NC, weights_NC), 0)
        nothing = jnp.zeros((num_tokens, model_dim), results_YD.dtype)
        return reduce(operator.add, [products_NCD[:, place] for place in range(per_token)], nothing)
    # Rows that there are first, in their order.
    order_NC = jnp.argsort(~has_row_NC, axis=1, stable=True)
    places_NC, weights_NC = (jnp.take_along_axis(each, order_NC, axis=1) for each in (places_NC, weights_NC))
    counts_N = jnp.sum(has_row_NC, axis=1, dtype=jnp.int32)
    order_N = jnp.argsort(-counts_N) if is_split else jnp.arange(num_tokens)
    parts = -(-num_tokens // _TOKENS)
    missing = -num_tokens % parts
    padded_N = jnp.pad(order_N, (0, missing)).reshape(parts, -1)

    def add(tokens: Array) -> Array:
        places, weights, counts = places_NC[tokens], weights_NC[tokens], counts_N[tokens]

        def one_more(place: Array, total: Array) -> Array:
            own = (lax.dynamic_index_in_dim(each, place, 1, keepdims=False) for each in (places, weights))
            return total + jnp.where(place < counts[:, None], weighted(*own), 0)

        nothing = jnp.zeros((len(tokens), model_dim), results_YD.dtype)
        return lax.fori_loop(jnp.int32(0), jnp.max(counts), one_more, nothing)

    total_ND = lax.map(add, padded_N).reshape(-1, model_dim)[:num_tokens]
    return total_ND[jnp.argsort(order_N)] if is_split else total_ND


def _flat(kernel: Any) -> tuple[Any, Any]:
    """Return a kernel as a stack ``[X, out, in]``, and the place of the layer's first expert in it."""
    return kernel.flat(jnp.int32(0)) if isinstance(kernel, LayerView) else (kernel, 0)


def _operand(stack: Any) -> Any:
    """Return a stack of kernels as the grouped product takes it; of described ones, what describes their form."""
    return codes_of(stack) if isinstance(stack, QuantizedArray) else stack
