"""Products of rows that lie expert by expert with their experts' kernels (MegaBlocks; Gale et al., 2211.15841)."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chips import CHIPS
from pallas_kernels.grouped_matmul.codes import Codes, Form, check_codes
from pallas_kernels.grouped_matmul.kernel import finish_of
from pallas_kernels.grouped_matmul.weights import Weights, read_weights, weights_of
from pallas_kernels.tuning import current_chip, tuned_blocks

LANES = 128
FEWEST_ROWS = 8
_MOST_ROWS = 256
# Of a core's vector memory; the rest is for what the compiler keeps between products.
_SHARE = 0.6


class Steps(NamedTuple):
    """The expert, the block of rows and the block of outputs of each step, and the number of steps."""

    expert_I: jax.Array
    rows_I: jax.Array
    outputs_I: jax.Array
    count: jax.Array


def grouped_matmul(
    x_YD: jax.Array,
    kernels: Sequence[jax.Array | Codes],
    experts_X: jax.Array,
    count: jax.Array,
    *,
    first_expert: jax.Array | int = 0,
    biases: Sequence[jax.Array] | None = None,
    combine: Callable[..., Any] | None = None,
    rounded_to: jax.typing.DTypeLike = jnp.bfloat16,
    out_dtype: jax.typing.DTypeLike = jnp.float32,
    read: tuple[float, float] | None = None,
    block_f: int | None = None,
    chip: str | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """Return ``x_YD @ kernel[expert].T`` ``[Y, F]``, each row with the kernel of its expert; sums are in float32.

    ``x_YD`` are X blocks of as many rows, a multiple of 8, of which the first ``count`` are run: block i with expert
    ``experts_X[i]`` of kernels ``[E, F, D]``; experts ascend. What other blocks return is not defined. An expert's
    kernel is read once for all of its blocks, that of an expert without blocks never. The order of a row's sums depends
    on D alone, with codes in groups on the rows of a block too (`columns`). The kernels and nothing else may be stacks
    ``[L * E, F, D]``, of which the layer begins at ``first_expert``.

    Of several kernels, ``combine`` makes one result of the products, given in float32, of numbers of ``rounded_to``.
    ``biases`` ``[E, F]`` are added to the products before. ``read`` is how many experts and rows are expected to be
    read, for the estimate of the kernel's cost; by default, as many as there may be.

    ``block_f`` outputs are computed at a time, by default those of tuned.json for ``chip``, or for the chip that is
    compiled for. Raise ValueError if arguments do not match or blocks do not fit into vector memory (`fit_rows`).
    """
    num_experts = _check(x_YD, kernels, experts_X, biases, combine)
    num_rows, model_dim = x_YD.shape
    num_blocks = experts_X.shape[0]
    weights = weights_of(kernels)
    channels, rows = weights.channels, num_rows // num_blocks
    chip = chip or current_chip()
    if block_f is None:
        tuned = tuned_blocks("grouped_matmul", shape_key(rows, model_dim, channels, len(kernels), weights.name), chip)
        block_f = fit_block(tuned["block_f"], rows, weights, chip)
    if not block_f or weights.needed_bytes(rows, block_f) > _limit(chip):
        raise ValueError(f"{rows} rows of {model_dim} numbers do not fit into the vector memory of {chip} (fit_rows)")
    block_f = min(block_f, -(-channels // LANES) * LANES)
    steps = list_steps(experts_X.astype(jnp.int32), jnp.asarray(count, jnp.int32), pl.cdiv(channels, block_f))
    first = jnp.asarray(first_expert, jnp.int32)
    experts_read, rows_read = read or (min(num_blocks, num_experts), num_rows)
    out_item = jnp.dtype(out_dtype).itemsize
    biased = [] if biases is None else [bias[:, None] for bias in biases]
    precision = lax.Precision.HIGHEST if x_YD.dtype == jnp.float32 else lax.Precision.DEFAULT
    reading = read_weights(kernels, weights, rows, block_f, not interpret)
    return pl.pallas_call(
        reading.body(finish_of(combine, rounded_to), len(biased), precision),
        name="grouped_matmul",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(steps.count,),
            in_specs=[
                pl.BlockSpec((rows, model_dim), lambda i, first, experts, rows, outputs: (rows[i], 0)),
                *reading.specs,
                *[
                    pl.BlockSpec(
                        (None, 1, block_f), lambda i, first, experts, rows, outputs: (experts[i], 0, outputs[i])
                    )
                ]
                * len(biased),
            ],
            out_specs=pl.BlockSpec((rows, block_f), lambda i, first, experts, rows, outputs: (rows[i], outputs[i])),
            scratch_shapes=reading.scratch,
        ),
        out_shape=jax.ShapeDtypeStruct((num_rows, channels), out_dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=int(CHIPS[chip].vmem_bytes * 0.9)
        ),
        cost_estimate=pl.CostEstimate(
            flops=round(2 * rows_read * model_dim * channels * len(kernels)),
            bytes_accessed=round(
                experts_read * weights.bytes + rows_read * (model_dim * x_YD.dtype.itemsize + channels * out_item)
            ),
            transcendentals=0,
        ),
        interpret=interpret,
    )(first.reshape(1), steps.expert_I, steps.rows_I, steps.outputs_I, x_YD, *reading.operands, *biased)


def list_steps(experts_X: jax.Array, count: jax.Array, blocks_of_outputs: int) -> Steps:
    """List the steps: for each expert and each block of its outputs, the expert's blocks of rows.

    An expert's block of outputs stays in vector memory for all of its rows, and the only block of rows of an expert for
    all of its outputs.
    """
    index_X = jnp.arange(experts_X.shape[0], dtype=jnp.int32)
    runs_X = index_X < count
    # Sums over all pairs instead of gathers, which a TPU would run as loops.
    before_XX = runs_X & (experts_X < experts_X[:, None])
    first_X = jnp.sum(before_XX, axis=1, dtype=jnp.int32)
    same_X = jnp.sum(runs_X & (experts_X == experts_X[:, None]), axis=1, dtype=jnp.int32)
    same_X1 = jnp.maximum(same_X, 1)[:, None]
    # The steps of an expert are as many as its blocks of rows times those of outputs, in the places of these.
    place_XO = (index_X - first_X)[:, None] * blocks_of_outputs + jnp.arange(blocks_of_outputs, dtype=jnp.int32)
    outputs_XO = jnp.minimum(place_XO // same_X1, blocks_of_outputs - 1)
    rows_XO = first_X[:, None] + place_XO % same_X1
    expert_XO = jnp.broadcast_to(experts_X[:, None], place_XO.shape)
    # A grid has at least one step.
    steps = jnp.maximum(count, 1) * blocks_of_outputs
    return Steps(expert_XO.reshape(-1), rows_XO.reshape(-1), outputs_XO.reshape(-1), steps)


def fit_rows(
    rows: int, model_dim: int, kernels: int, item_bytes: int, chip: str | None = None, form: Form | None = None
) -> int:
    """Return the rows of a block that fit into a chip's vector memory: a power of two from 8, up to 256 and ``rows``.

    0 if not even 8 do. ``model_dim`` is the width of the widest product, ``kernels`` the number of its kernels,
    ``form`` that of kernels in few bits.
    """
    found = FEWEST_ROWS
    while found < min(rows, _MOST_ROWS):
        found *= 2
    limit, weights = _limit(chip or current_chip()), Weights(kernels, model_dim, LANES, item_bytes, form)
    while found >= FEWEST_ROWS and weights.needed_bytes(found, LANES) > limit:
        found //= 2
    return found if found >= FEWEST_ROWS else 0


def fit_block(block_f: int, rows: int, weights: Weights, chip: str) -> int:
    """Return the outputs of a block, at most ``block_f``, as even as can be and few enough to fit; 0 if none do."""
    while block_f >= LANES and weights.needed_bytes(rows, block_f) > _limit(chip):
        block_f -= LANES
    if block_f < LANES:
        return 0
    blocks = -(-weights.channels // block_f)
    return -(-weights.channels // (blocks * LANES)) * LANES


def shape_key(rows: int, model_dim: int, channels: int, kernels: int, form: str | None = None) -> dict[str, int | str]:
    """Return the key in tuned.json: what the best blocks depend on."""
    plain: dict[str, int | str] = {"rows": rows, "D": model_dim, "F": channels, "kernels": kernels}
    return plain if form is None else {**plain, "weights": form}


def _limit(chip: str) -> int:
    return int(CHIPS[chip].vmem_bytes * _SHARE)


def _check(x_YD: Any, kernels: Any, experts_X: Any, biases: Any, combine: Any) -> int:
    """Return the number of experts that blocks may go to; raise ValueError if arguments do not match."""
    shape = kernels[0].shape
    if x_YD.ndim != 2 or len(shape) != 3 or shape[2] != x_YD.shape[1]:
        raise ValueError(f"grouped_matmul: rows {x_YD.shape} and kernels {shape} must be [Y, D] and [E, F, D]")
    kinds = {(kernel.shape, kernel.form if isinstance(kernel, Codes) else kernel.dtype) for kernel in kernels}
    if len(kinds) > 1:
        raise ValueError("grouped_matmul: kernels must be alike")
    if isinstance(kernels[0], Codes):
        for kernel in kernels:
            check_codes(kernel)
        if x_YD.dtype != jnp.bfloat16:
            raise ValueError(f"grouped_matmul: rows are {x_YD.dtype}, not bfloat16, which kernels in few bits multiply")
    elif x_YD.dtype not in (jnp.bfloat16, jnp.float32) or kernels[0].dtype != x_YD.dtype:
        raise ValueError(
            f"grouped_matmul: rows are {x_YD.dtype} and kernels {kernels[0].dtype}: both bfloat16 or both float32"
        )
    blocks = experts_X.shape[0]
    if not blocks or x_YD.shape[0] % blocks or x_YD.shape[0] // blocks % FEWEST_ROWS:
        raise ValueError(f"grouped_matmul: {x_YD.shape[0]} rows are not {blocks} blocks of a multiple of {FEWEST_ROWS}")
    if (combine is None) != (len(kernels) == 1):
        raise ValueError("grouped_matmul: several kernels, and only they, need combine")
    if biases is not None and any(bias.shape[1:] != shape[1:2] for bias in biases):
        raise ValueError(f"grouped_matmul: biases must be [E, {shape[1]}]")
    return shape[0] if biases is None else biases[0].shape[0]
