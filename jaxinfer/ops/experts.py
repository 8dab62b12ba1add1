"""The feed-forward layers of experts, each of which multiplies the tokens that a router gave it.

A token's copies, one for each of its experts, are laid out expert by expert in blocks of R rows, the last of an expert
filled up with zeros (as in MegaBlocks; Gale et al., 2211.15841). On a TPU a kernel runs over the blocks that there are
(`jaxinfer.ops.grouped_experts`), elsewhere a loop, and there too for sparse weights: both read the weights of no expert
that no token goes to, and drop no token. R follows from the number of tokens alone, so
programs have static shapes. `jax.lax.ragged_dot` multiplies every row by every expert on a CPU (8 times the operations
of 8 experts, and a copy of the weights), where it loses by the same factor.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxinfer.notation import EXPERT, TENSOR, Array, Float, Int
from jaxinfer.ops import low_rank
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cpu_kernels import products
from jaxinfer.ops.each_device import even_axis, row_axes
from jaxinfer.ops.few_bits.panels import PanelArray
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.ops.grouped_experts import (
    Load,
    OwnCopies,
    add_up,
    apply_grouped,
    grouped_rows,
    multiplies_grouped,
    multiplies_pairs,
    multiply_grouped,
)
from jaxinfer.ops.layer_view import LayerView
from jaxinfer.ops.matmul import multiply_by_xla
from jaxinfer.ops.quantized_sums import added_over, scattered_over
from jaxinfer.ops.rounding import rounded
from jaxinfer.ops.stacked_products import kernel_at, multiply_stacked, plain_kernel
from jaxinfer.ops.token_exchange import (
    choose_exchange,
    from_experts,
    gather_tokens,
    plan_routes,
    to_experts,
)

# So many rows of a block take an expert's weights as often as they pay: on a CPU, 64 rows take 0.15 of the time that 64
# blocks of one row take, and 16 rows 0.25. Elsewhere weights of two bytes are read as fast as about 250 rows are
# multiplied by them (v5e; 170 to 560 on other chips): with fewer a long prompt waits for weights that are read again.
_MOST_ROWS_ON_CPU, _MOST_ROWS = 64, 256

# The experts' gate, up and down: ``[E, F, D]``, ``[E, F, D]`` and ``[E, D, F]``.
Kernel = Array | QuantizedArray | LayerView
Kernels = tuple[Kernel, Kernel, Kernel]
# What is added to the products of all experts: ``[E, F]``, ``[E, F]`` and ``[E, D]``.
ExpertBiases = tuple[Array, Array, Array]
# The pairs of `OwnPairs`.
Pairs = tuple[tuple[Any, Any] | None, ...] | None
# Makes what down multiplies of the products of gate and up.
Gating = Callable[[Array, Array], Array]


class OwnPairs(NamedTuple):
    """Each row's number of a low-rank pair in every expert, negative for none, and the pairs of gate, up and down.

    Of each kernel they are ``[E, N, R, in]`` and ``[E, N, R, out]``, None where nobody has a part in it.
    """

    ids_B: Int[Array, " B"]
    pairs: tuple[tuple[Any, Any] | None, ...]

    @classmethod
    def of(cls, stacks: Any, ids_B: Int[Array, " B"]) -> "OwnPairs":
        """Return the stacks of loaded adapters by kernel."""
        names = "gate", "up", "down"
        found = ((stacks[f"{name}_down"], stacks[f"{name}_up"]) if f"{name}_down" in stacks else None for name in names)
        return cls(ids_B, tuple(found))


class Blocks(NamedTuple):
    """Where copies of tokens stand: ``count`` blocks, of which each belongs to an expert.

    ``tokens`` are the tokens of all rows (one past the last: zeros), ``places`` the rows of each token's copies (one
    past the last: none).
    """

    experts: Int[Array, " X"]
    count: Int[Array, ""]
    tokens: Int[Array, " Y"]
    places_NC: Int[Array, "N C"]


def gating_of(activate: Callable[[Array], Array], limit: float | None) -> Gating:
    """Return ``activate(gate) * up``; with a limit, both are bounded, and one is added to up (`Experts`)."""

    def gate(gate: Array, up: Array) -> Array:
        if limit is None:
            return activate(gate) * up
        return activate(jnp.minimum(gate, limit)) * (jnp.clip(up, -limit, limit) + 1)

    return gate


def apply_experts(
    inputs_BTD: Float[Array, "B T D"],
    chosen_BTC: Int[Array, "B T C"],
    weights_BTC: Float[Array, "B T C"],
    kernels: Kernels,
    gating: Gating,
    backend: Backend,
    biases: ExpertBiases | None = None,
    own: OwnPairs | None = None,
) -> Float[Array, "B T D"]:
    """Return the weighted sums of what each token's experts return, in the backend's compute dtype.

    What ``own`` has for a row is added to the kernels of its experts; a row without keeps its bits.

    With the CPU kernels, a token's bits do not depend on the other tokens or on their number, nor on how many devices
    the experts are split over, or how tokens reach them.
    """
    *lead, _ = inputs_BTD.shape
    rows = row_axes(lead, backend)
    num_experts, ffn_dim, _ = kernels[0].shape
    expert_axis, ffn_axis = even_axis(EXPERT, num_experts, backend), even_axis(TENSOR, ffn_dim, backend)
    layer = _Layer(
        lead[0],
        gating,
        num_experts,
        expert_axis,
        expert_axis is not None and isinstance(rows[0], tuple),
        backend,
    )

    def run(inputs: Array, chosen: Array, weights: Array, biases: Any, ids: Any, pairs: Any, *kernels: Kernel) -> Array:
        """Return the sums of this device's tokens over their experts, or over parts of these, added up."""
        if biases is not None and ffn_axis is not None:
            # One device adds it for all that add up.
            biases = (*biases[:2], jnp.where(lax.axis_index(ffn_axis) == 0, biases[2], 0))
        tokens = Tokens(*(each.reshape(-1, each.shape[-1]) for each in (inputs, chosen, weights)))
        if ids is not None:
            # Each of a row's tokens has its number.
            tokens = tokens._replace(ids_N=jnp.repeat(ids, inputs.shape[1]))
        output_ND = _differentiable(layer, pairs)(tokens, kernels, biases)
        if ffn_axis is not None:
            output_ND = added_over(output_ND, ffn_axis, backend)
        return output_ND.reshape(inputs.shape).astype(backend.compute_dtype)

    def spec(kernel: Kernel, *axes: str | None) -> Any:
        if isinstance(kernel, LayerView):
            return LayerView(spec(kernel.stack, None, *axes), PartitionSpec())
        if isinstance(kernel, PanelArray):  # on one device
            return PartitionSpec()
        split = PartitionSpec(*axes)
        return kernel.with_parts(kernel.specs(split)) if isinstance(kernel, QuantizedArray) else split

    gate, up, down = kernels
    wide = (spec(kernel, expert_axis, ffn_axis, None) for kernel in (gate, up))
    whole = PartitionSpec(*rows, None)
    of_features = PartitionSpec(expert_axis, ffn_axis)
    of_biases = None if biases is None else (of_features, of_features, PartitionSpec(expert_axis))
    ids, pairs = own or (None, None)
    of_pairs, by_inputs, by_outputs = None, (None, None, ffn_axis), (ffn_axis, ffn_axis, None)
    if pairs is not None:
        # Ranks are whole everywhere: what a device has of a sum over features is a part of the whole one.
        of_pairs = tuple(
            pair and tuple(spec(stack, expert_axis, None, None, axis) for stack, axis in zip(pair, (by_in, by_out)))
            for pair, by_in, by_out in zip(pairs, by_inputs, by_outputs)
        )
    of_ids = None if ids is None else PartitionSpec(rows[0])
    parts = (whole, whole, whole, of_biases, of_ids, of_pairs, *wide, spec(down, expert_axis, None, ffn_axis))
    given = inputs_BTD, chosen_BTC, weights_BTC, biases, ids, pairs
    return backend.on_devices(run, parts, whole)(*given, *kernels)


def block_rows(num_tokens: int, per_token: int, num_experts: int, platform: str) -> int:
    """Return R: about as many rows as an expert gets of tokens that go to all alike, a power of two."""
    most = min(num_tokens * per_token / num_experts, _MOST_ROWS_ON_CPU if platform == "cpu" else _MOST_ROWS)
    rows = 1
    while rows < most:
        rows *= 2
    return min(rows, num_tokens)


class Tokens(NamedTuple):
    """Tokens, the experts that each goes to, of all or of a device's own, their weights, and numbers of own pairs."""

    inputs_ND: Float[Array, "N D"]
    chosen_NC: Int[Array, "N C"]
    weights_NC: Float[Array, "N C"]
    ids_N: Int[Array, " N"] | None = None


class _Layer(NamedTuple):
    """What is static of a layer: ``axis`` splits its experts, if any, and with ``splits_rows`` its tokens too.

    ``batch`` is how many rows there are on all devices.
    """

    batch: int
    gating: Gating
    num_experts: int
    axis: str | None
    splits_rows: bool
    backend: Backend

    @property
    def devices(self) -> int:
        """How many devices have experts."""
        mesh = self.backend.mesh
        return 1 if mesh is None or self.axis is None else mesh.shape[self.axis]

    @property
    def adds_copies(self) -> bool:
        """Whether devices exchange what each expert returned, not sums, so that the bits are those of one device.

        CPU devices share a memory: more bytes cost little there.
        """
        is_exact = self.backend.kernels == "xla" and self.backend.collectives is None
        return self.axis is not None and self.backend.platform == "cpu" and is_exact

    def own(self, tokens: Tokens, kernels: Kernels) -> Tokens:
        """Count experts from this device's first."""
        if self.axis is None:
            return tokens
        return tokens._replace(chosen_NC=tokens.chosen_NC - lax.axis_index(self.axis) * kernels[0].shape[0])

    def added(self, parts: Array) -> Array:
        """Add up the parts of all devices that have experts, and return this device's tokens."""
        if self.axis is None:
            return parts
        if not self.splits_rows:
            # Of copies all parts but one are zeros, whose order is none.
            return lax.psum(parts, self.axis) if self.adds_copies else added_over(parts, self.axis, self.backend)
        return scattered_over(parts, self.axis, self.backend)


def _differentiable(layer: _Layer, pairs: Pairs) -> Callable[..., Array]:
    """Return the layer on a device, for its tokens; its derivative is that of every expert and token.

    With ``pairs``, which are loaded and not trained, it has none.
    """
    if pairs is not None:
        return functools.partial(_apply, layer, pairs=pairs)
    run = jax.custom_jvp(functools.partial(_apply, layer))
    every = functools.partial(_by_every_expert, layer)
    # Values too, as in the CPU kernels' products.
    run.defjvp(lambda primals, tangents: jax.jvp(every, primals, tangents))
    return run


def _apply(layer: _Layer, tokens: Tokens, kernels: Kernels, biases: ExpertBiases | None, pairs: Pairs = None) -> Array:
    (num_tokens, per_token), model_dim = tokens.chosen_NC.shape, tokens.inputs_ND.shape[1]
    weights_NC = tokens.weights_NC
    if layer.axis is not None and layer.splits_rows:
        form = choose_exchange(num_tokens, per_token, model_dim, layer.devices, layer.backend)
        if form == "all_to_all" and pairs is None:
            return _by_all_to_all(layer, layer.axis, tokens, kernels, biases)
        ids_N = None if tokens.ids_N is None else lax.all_gather(tokens.ids_N, layer.axis, tiled=True)
        tokens = Tokens(*gather_tokens(*tokens[:3], layer.axis), ids_N)
    everyone = layer.own(tokens, kernels)
    if not layer.adds_copies:
        return layer.added(_by_blocks(layer, everyone, kernels, biases, pairs))
    blocks, results_YD = _in_blocks(layer, everyone, kernels, biases, pairs)
    copies_NCD = layer.added(results_YD.at[blocks.places_NC].get(mode="fill", fill_value=0))
    return _weighted_sum(copies_NCD, weights_NC)


def _by_all_to_all(
    layer: _Layer, axis: str, tokens: Tokens, kernels: Kernels, biases: ExpertBiases | None
) -> Float[Array, "N D"]:
    """Send copies to the devices of their experts, and add up what comes back."""
    backend, (num_tokens, per_token) = layer.backend, tokens.chosen_NC.shape
    rows, is_grouped, load = _block_rows(layer, layer.devices * num_tokens, per_token, kernels)
    routes = plan_routes(tokens.chosen_NC, load.own, rows, axis, layer.devices)
    inputs_ND = tokens.inputs_ND.astype(backend.compute_dtype) if is_grouped else tokens.inputs_ND
    copies_YD = to_experts(inputs_ND, routes, len(routes.experts) * rows, axis, backend)
    multiply = functools.partial(multiply_grouped, load=load) if is_grouped else _multiply_blocks
    results_YD = multiply(copies_YD, routes.experts, routes.count, kernels, biases, layer.gating, backend=backend)
    own_YD = from_experts(results_YD, routes, axis, backend)
    return add_up(own_YD, routes.places_NC, tokens.weights_NC, is_split=False)


def _block_rows(layer: _Layer, num_tokens: int, per_token: int, kernels: Kernels) -> tuple[int, bool, Load]:
    """Return R for so many tokens, and whether the grouped product multiplies its blocks."""
    backend, own = layer.backend, kernels[0].shape[0]
    mean, load = num_tokens * per_token / layer.num_experts, Load(own, layer.num_experts, per_token, num_tokens)
    grouped = 0
    if multiplies_grouped(kernels, backend):
        grouped = grouped_rows(mean, kernels, backend.compute_dtype)
    return grouped or block_rows(num_tokens, per_token, layer.num_experts, backend.platform), grouped > 0, load


def _by_blocks(
    layer: _Layer, tokens: Tokens, kernels: Kernels, biases: ExpertBiases | None, pairs: Pairs
) -> Float[Array, "N D"]:
    """Return what this device's experts add to each token's sum."""
    num_tokens, per_token = tokens.chosen_NC.shape
    rows, is_grouped, load = _block_rows(layer, num_tokens, per_token, kernels)
    if is_grouped and (pairs is None or multiplies_pairs(kernels, pairs, layer.backend)):
        blocks = lay_out(tokens.chosen_NC, load.own, rows)
        own = None
        if tokens.ids_N is not None and pairs is not None:
            ids_Y = jnp.take(tokens.ids_N, blocks.tokens, mode="fill", fill_value=-1)
            own = OwnCopies(ids_Y, pairs, layer.batch)
        inputs_ND, weights_NC = tokens.inputs_ND, tokens.weights_NC
        return apply_grouped(inputs_ND, blocks, weights_NC, kernels, biases, layer.gating, load, layer.backend, own)
    blocks, results_YD = _in_blocks(layer, tokens, kernels, biases, pairs)
    return _weighted_sum(results_YD.at[blocks.places_NC].get(mode="fill", fill_value=0), tokens.weights_NC)


def _in_blocks(
    layer: _Layer, tokens: Tokens, kernels: Kernels, biases: ExpertBiases | None, pairs: Pairs
) -> tuple[Blocks, Float[Array, "Y D"]]:
    """Return where copies stand, and what this device's experts make of them, by a loop."""
    num_tokens, per_token = tokens.chosen_NC.shape
    rows = block_rows(num_tokens, per_token, layer.num_experts, layer.backend.platform)
    blocks = lay_out(tokens.chosen_NC, kernels[0].shape[0], rows)
    copies_YD = jnp.take(tokens.inputs_ND, blocks.tokens, axis=0, mode="fill", fill_value=0)
    given = copies_YD, blocks.experts, blocks.count
    own = None
    if tokens.ids_N is not None and pairs is not None:
        own = jnp.take(tokens.ids_N, blocks.tokens, mode="fill", fill_value=-1), pairs
    return blocks, _multiply_blocks(*given, kernels, biases, layer.gating, layer.backend, own)


def _multiply_blocks(
    copies_YD: Float[Array, "Y D"],
    experts: Int[Array, " X"],
    count: Int[Array, ""],
    kernels: Kernels,
    biases: ExpertBiases | None,
    gating: Gating,
    backend: Backend,
    own: tuple[Int[Array, " Y"], Any] | None = None,
) -> Float[Array, "Y D"]:
    """Return what experts make of the rows of their blocks, of which the first ``count`` are run.

    ``own`` are the numbers of rows' own pairs, and these.
    """
    rows = len(copies_YD) // len(experts)

    def advance(index: Array, results: Array) -> Array:
        block = lax.dynamic_slice_in_dim(copies_YD, index * rows, rows)
        pairs = None if own is None else (lax.dynamic_slice_in_dim(own[0], index * rows, rows), own[1])
        done = _apply_one(gating, backend, block, kernels, biases, experts[index], pairs)
        return lax.dynamic_update_slice_in_dim(results, done, index * rows, 0)

    # Not the backend's: a sum over experts and devices is rounded at its end.
    results_YD = jnp.zeros(copies_YD.shape, _accumulator(kernels[0]))
    return lax.fori_loop(jnp.int32(0), count, advance, results_YD)


def lay_out(chosen_NC: Int[Array, "N C"], num_experts: int, rows: int) -> Blocks:
    """Give every token's copies their rows; those for experts of other devices get none."""
    num_tokens, per_token = chosen_NC.shape
    pairs = num_tokens * per_token
    most = pairs if rows == 1 else (pairs + min(num_experts, pairs) * (rows - 1)) // rows
    flat = chosen_NC.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    order = jnp.argsort(flat, stable=True)
    counts_E = jnp.zeros((num_experts,), jnp.int32).at[flat].add(1, mode="drop")
    ends_E = jnp.cumsum((counts_E + rows - 1) // rows, dtype=jnp.int32)
    before_E = jnp.cumsum(counts_E, dtype=jnp.int32) - counts_E
    first_E = (ends_E - (counts_E + rows - 1) // rows) * rows
    sorted_experts = flat[order]
    among = jnp.minimum(sorted_experts, num_experts - 1)
    places = first_E[among] + jnp.arange(pairs, dtype=jnp.int32) - before_E[among]
    places = jnp.where(sorted_experts < num_experts, places, most * rows)
    of_places = (order // per_token).astype(jnp.int32)
    tokens = jnp.full((most * rows,), num_tokens, jnp.int32).at[places].set(of_places, mode="drop")
    experts = jnp.searchsorted(ends_E, jnp.arange(most, dtype=jnp.int32), side="right")
    places_NC = jnp.zeros((pairs,), jnp.int32).at[order].set(places).reshape(num_tokens, per_token)
    return Blocks(jnp.minimum(experts, num_experts - 1).astype(jnp.int32), ends_E[-1], tokens, places_NC)


def _apply_one(
    gating: Gating,
    backend: Backend,
    rows_RD: Array,
    kernels: Kernels,
    biases: ExpertBiases | None,
    expert: Array,
    own: tuple[Array, Any] | None,
) -> Array:
    """Return what one expert makes of rows, in the accumulator's dtype."""
    *wide, down = kernels

    def with_own(output: Array, rows: Array, which: int) -> Array:
        if own is None or (pair := own[1][which]) is None:
            return output
        alone = replace(backend, mesh=None)
        of_down, of_up = (LayerView(*_flat(stack, expert)) for stack in pair)
        (inner,) = low_rank.project_down(rows[:, None], [of_down], own[0], alone)
        return low_rank.add_up(output[:, None], inner, of_up, own[0], alone)[:, 0]

    def with_bias(rows: Array, which: int) -> Array:
        if biases is None:
            return rows
        own = lax.dynamic_index_in_dim(biases[which], expert, keepdims=False)
        return rows + jnp.broadcast_to(own.astype(rows.dtype), rows.shape)

    gate_RF, up_RF = (
        with_own(with_bias(rows_RF, which).astype(backend.compute_dtype), rows_RD, which)
        for which, rows_RF in enumerate(_multiply(backend, rows_RD, tuple(wide), expert))
    )
    inner_RF = gating(gate_RF, up_RF)
    return with_own(with_bias(_multiply(backend, inner_RF, (down,), expert)[0], 2), inner_RF, 2)


def _multiply(backend: Backend, rows: Array, kernels: tuple[Kernel, ...], expert: Array) -> list[Array]:
    """Return products of rows with one expert's part of each of several kernels, read where it lies."""
    stacks, places = zip(*(_flat(kernel, expert) for kernel in kernels))
    if all(isinstance(stack, QuantizedArray) for stack in stacks):
        return multiply_stacked(rows, stacks, places[0], backend)
    if any(isinstance(stack, QuantizedArray) for stack in stacks):
        return [_multiply(backend, rows, (kernel,), expert)[0] for kernel in kernels]
    dtype, width = stacks[0].dtype, rows.shape[-1]
    if backend.cpu_kernels and products.multiplies(dtype, width):
        sizes = tuple(stack.shape[1] for stack in stacks)
        # The CPU kernels read stacks ``[X, 1, out, in]``.
        given = tuple(stack[:, None] for stack in stacks)
        found = products.multiply_by_each(rows.astype(dtype)[None, None], given, places[0], sizes)
        return [each[0, 0] for each in found]
    return [multiply_by_xla(rows, kernel_at(stack, place), backend, False) for stack, place in zip(stacks, places)]


def _flat(kernel: Kernel, expert: Array) -> tuple[Any, Array]:
    """Return a kernel as a stack ``[X, out, in]``, and an expert's place in it."""
    return kernel.flat(expert) if isinstance(kernel, LayerView) else (kernel, expert)


def _accumulator(kernel: Kernel) -> Any:
    """Return the dtype of products with a kernel."""
    stack = kernel.stack if isinstance(kernel, LayerView) else kernel
    return jnp.float32 if isinstance(stack, QuantizedArray) else jnp.promote_types(stack.dtype, jnp.float32)


def _weighted_sum(results_NCD: Float[Array, "N C D"], weights_NC: Float[Array, "N C"]) -> Float[Array, "N D"]:
    """Add up what a token's experts returned, each multiplied by its weight, the best expert first."""
    products_NCD = rounded(results_NCD * weights_NC[..., None].astype(results_NCD.dtype))
    return functools.reduce(operator.add, [products_NCD[:, place] for place in range(weights_NC.shape[1])])


def _by_every_expert(layer: _Layer, tokens: Tokens, kernels: Kernels, biases: ExpertBiases | None) -> Array:
    """Return the same sums, up to rounding, from operations that JAX differentiates."""
    backend = layer.backend
    if layer.axis is not None and layer.splits_rows:
        tokens = Tokens(*(lax.all_gather(each, layer.axis, tiled=True) for each in tokens[:3]))
    inputs_ND, chosen_NC, weights_NC, _ = layer.own(tokens, kernels)

    def add(total_ND: Array, expert: Any) -> tuple[Array, None]:
        index, own_kernels, own = expert
        gate_FD, up_FD, down_DF = (plain_kernel(kernel, backend) for kernel in own_kernels)
        gate_F, up_F, down_D = (0, 0, 0) if own is None else own
        weight_N = jnp.sum(jnp.where(chosen_NC == index, weights_NC, 0), axis=-1)
        gate_NF, up_NF = (
            (multiply_by_xla(inputs_ND, kernel, backend, False) + bias).astype(backend.compute_dtype)
            for kernel, bias in ((gate_FD, gate_F), (up_FD, up_F))
        )
        result_ND = multiply_by_xla(layer.gating(gate_NF, up_NF), down_DF, backend, False) + down_D
        return total_ND + weight_N[:, None].astype(result_ND.dtype) * result_ND, None

    stacks = tuple(kernel.whole() if isinstance(kernel, LayerView) else kernel for kernel in kernels)
    total_ND = jnp.zeros(inputs_ND.shape, _accumulator(kernels[0]))
    return layer.added(lax.scan(add, total_ND, (jnp.arange(stacks[0].shape[0]), stacks, biases))[0])
