"""Products of rows with a low-rank pair of matrices of their own (Punica; Chen et al., 2310.18547).

Only adapters that rows have are read, each once for a block of rows, up to four of a block in one step. So as many as
four are read where there are four rows or more, whatever they have. What a row gets does not depend on the others.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chips import CHIPS
from pallas_kernels.low_rank.kernel import down_body, up_body
from pallas_kernels.low_rank.steps import NOBODY, Steps, list_steps
from pallas_kernels.tuning import current_chip, tuned_blocks

LANES = 128
FEWEST_ROWS = 16  # of a tile of bfloat16
# The adapters that one step meets: more operands take longer to fetch than they save.
_TOGETHER = 4
# Of a core's vector memory; the rest is for what the compiler keeps between products.
_SHARE = 0.6
_DTYPES = (jnp.bfloat16, jnp.float32)


def project_down(
    x_BTI: jax.Array,
    stacks: Sequence[jax.Array],
    ids_B: jax.Array,
    *,
    number: int,
    first: jax.Array | int = 0,
    most: int | None = None,
    runs: tuple[int, int] | None = None,
    rows: int | None = None,
    chip: str | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> list[jax.Array]:
    """Return ``stack[first + id] @ x`` ``[B, T, R]`` in float32 for each of several stacks ``[X, R, I]``.

    ``ids_B`` int32 are below ``number``; what a row of a negative id gets is not defined. Rows have at most ``most``
    different ids, by default all; with ``runs``, each run of so many ``[B * T]`` rows has at most as many as its second
    number says. ``rows`` of ``[B * T]`` are computed at a time, by default those of tuned.json for ``chip``, or for the
    chip that is compiled for, as far as they fit into its vector memory. Raise ValueError if arguments do not match or
    do not fit (`fit_rows`).
    """
    _check(x_BTI, stacks, ids_B, 2)
    (batch, tokens, width), ranks = x_BTI.shape, [stack.shape[1] for stack in stacks]
    chip = chip or current_chip()
    plan = _plan(batch, tokens, most or number, width, sum(ranks), x_BTI.dtype, rows, chip, runs)
    ids_Y1, steps = plan.steps(ids_B)
    x_YI = plan.padded(x_BTI)
    of_rows = [pl.BlockSpec((plan.rows, size), _of_rows) for size in (1, width, *ranks)]
    found = pl.pallas_call(
        down_body(plan.together, len(stacks), _precision(x_YI)),
        name="low_rank_down",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(steps.count,),
            in_specs=[
                *of_rows[:2],
                *[
                    pl.BlockSpec((None, rank, width), partial(_of_adapter, place, len(steps.rows_I)))
                    for rank in ranks
                    for place in range(plan.together)
                ],
            ],
            out_specs=of_rows[2:],
        ),
        out_shape=[jax.ShapeDtypeStruct((len(x_YI), rank), jnp.float32) for rank in ranks],
        compiler_params=_compiler_params(chip, 1),
        cost_estimate=pl.CostEstimate(
            flops=2 * len(x_YI) * width * sum(ranks),
            bytes_accessed=plan.most * width * sum(ranks) * x_YI.dtype.itemsize
            + x_YI.nbytes
            + 4 * len(x_YI) * sum(ranks),
            transcendentals=0,
        ),
        interpret=interpret,
    )(*_scalars(first, steps), ids_Y1, x_YI, *_operands(stacks, plan, interpret))
    return [each[: batch * tokens].reshape(batch, tokens, -1) for each in found]


def add_up(
    base_BTO: jax.Array,
    inner_BTR: jax.Array,
    up_XRO: jax.Array,
    ids_B: jax.Array,
    *,
    number: int,
    first: jax.Array | int = 0,
    most: int | None = None,
    runs: tuple[int, int] | None = None,
    rows: int | None = None,
    chip: str | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """Return ``base + inner @ up[first + id]`` of each row; rows of a negative id keep their bits.

    ``inner`` is what `project_down` returns, rounded to the dtype of ``up``. Arguments and errors as there.
    """
    _check(inner_BTR, [up_XRO], ids_B, 1)
    (batch, tokens, outputs), (rank, item) = base_BTO.shape, (up_XRO.shape[1], up_XRO.dtype.itemsize)
    chip = chip or current_chip()
    plan = _plan(batch, tokens, most or number, LANES, rank, base_BTO.dtype, rows, chip, runs)
    per_output = 2 * (plan.together * rank * item + 2 * plan.rows * base_BTO.dtype.itemsize) + 4 * plan.rows
    block_o = max(_limit(chip) // per_output // LANES, 1) * LANES
    block_o = outputs if outputs <= block_o else block_o
    ids_Y1, steps = plan.steps(ids_B)
    base_YO, inner_YR = plan.padded(base_BTO), plan.padded(inner_BTR)
    of_base = pl.BlockSpec((plan.rows, block_o), lambda o, i, first, rows, *_: (rows[i], o))
    of_rows = [pl.BlockSpec((plan.rows, size), lambda o, i, *scalars: _of_rows(i, *scalars)) for size in (1, rank)]
    found_YO = pl.pallas_call(
        up_body(plan.together, _precision(up_XRO)),
        name="low_rank_up",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(pl.cdiv(outputs, block_o), steps.count),
            in_specs=[
                *of_rows,
                *[
                    pl.BlockSpec((None, rank, block_o), partial(_of_outputs, place, len(steps.rows_I)))
                    for place in range(plan.together)
                ],
                of_base,
            ],
            out_specs=of_base,
        ),
        out_shape=jax.ShapeDtypeStruct(base_YO.shape, base_YO.dtype),
        compiler_params=_compiler_params(chip, 2),
        cost_estimate=pl.CostEstimate(
            flops=2 * base_YO.size * rank,
            bytes_accessed=plan.most * rank * outputs * item + 2 * base_YO.nbytes + inner_YR.nbytes,
            transcendentals=0,
        ),
        # Blocks of rows without an adapter are not visited.
        input_output_aliases={6 + plan.together: 0},
        interpret=interpret,
    )(*_scalars(first, steps), ids_Y1, inner_YR, *_operands([up_XRO], plan, interpret), base_YO)
    return found_YO[: batch * tokens].reshape(base_BTO.shape)


def fit_rows(
    batch: int, tokens: int, width: int, rank: int, item_bytes: int, chip: str | None = None, most: int | None = None
) -> int:
    """Return the rows of a block: a power of two from 16, as tuned.json has it and as fits into a chip's vector memory.

    0 if not even 16 do. ``rank`` is the sum of those of all stacks that are multiplied at once, ``most`` the adapters
    of the batch at the most, by default as many as its rows.
    """
    chip, most = chip or current_chip(), most or batch
    found, limit = FEWEST_ROWS, _limit(chip)
    tuned = tuned_blocks("low_rank", shape_key(batch, tokens, width, rank), chip)["rows"]
    while found < min(batch * tokens, tuned):
        found *= 2

    def needed(rows: int) -> int:
        wide = _together(rows, tokens, most) * rank
        # Rows of ids and of results lie in whole lanes.
        of_rows = 2 * (width * item_bytes + 4 * LANES + 4 * (rank + LANES)) + 8 * (wide + LANES)
        return 2 * wide * width * item_bytes + rows * of_rows

    while found >= FEWEST_ROWS and needed(found) > limit:
        found //= 2
    return found if found >= FEWEST_ROWS else 0


def shape_key(batch: int, tokens: int, width: int, rank: int) -> dict[str, int | str]:
    """Return the key in tuned.json: what the best blocks depend on."""
    return {"B": batch, "T": tokens, "width": width, "R": rank}


class _Plan(NamedTuple):
    """The sizes of a product: ``rows`` of a block, and how many adapters the batch, a block and a step have at most."""

    tokens: int
    rows: int
    most: int
    of_block: int
    together: int

    def steps(self, ids_B: jax.Array) -> tuple[jax.Array, Steps]:
        """Return the ids of whole blocks of rows ``[Y, 1]``, and the steps."""
        ids_Y = jnp.repeat(ids_B.astype(jnp.int32), self.tokens)
        ids_Y = jnp.pad(ids_Y, (0, -len(ids_Y) % self.rows), constant_values=NOBODY + 1)
        blocks = len(ids_Y) // self.rows
        return ids_Y[:, None], list_steps(ids_Y, blocks, self.of_block, self.together)

    def padded(self, array: jax.Array) -> jax.Array:
        """Return whole blocks of rows."""
        flat = array.reshape(-1, array.shape[-1])
        missing = -len(flat) % self.rows
        return jnp.pad(flat, ((0, missing), (0, 0))) if missing else flat


def _plan(
    batch: int,
    tokens: int,
    most: int,
    width: int,
    rank: int,
    dtype: Any,
    rows: int | None,
    chip: str,
    runs: tuple[int, int] | None,
) -> _Plan:
    most = min(most, batch)
    rows = rows or fit_rows(batch, tokens, width, rank, jnp.dtype(dtype).itemsize, chip, most)
    if not rows:
        raise ValueError(f"low_rank: ranks of {rank} by {width} do not fit into the vector memory of {chip}")
    of_block = _of_block(rows, tokens, most)
    if runs is not None:
        length, most_of_run = runs
        # A block may begin and end within a run.
        count = -(-rows // length) if rows % length == 0 or length % rows == 0 else (rows - 2) // length + 2
        of_block = min(of_block, count * most_of_run)
    return _Plan(tokens, rows, most, of_block, min(_TOGETHER, of_block))


def _of_block(rows: int, tokens: int, most: int) -> int:
    """Return how many adapters rows that follow each other have at the most."""
    if tokens % rows == 0:
        return 1
    return min(most, rows // tokens if rows % tokens == 0 else (rows - 2) // tokens + 2)


def _together(rows: int, tokens: int, most: int) -> int:
    return min(_TOGETHER, _of_block(rows, tokens, most))


def _of_rows(i: Any, _first: Any, rows: Any, *_: Any) -> Any:
    return rows[i], 0


def _of_adapter(place: int, steps: int, i: Any, first: Any, _rows: Any, fetched: Any, _met: Any) -> Any:
    return first[0] + fetched[place * steps + i], 0, 0


def _of_outputs(place: int, steps: int, o: Any, i: Any, *scalars: Any) -> Any:
    return *_of_adapter(place, steps, i, *scalars)[:2], o


def _operands(stacks: Sequence[jax.Array], plan: _Plan, interpret: Any) -> list[jax.Array]:
    """Return each stack for each place of a step."""
    if not interpret:
        # Else the compiler may copy whole stacks into vector memory.
        stacks = [pltpu.with_memory_space_constraint(stack, pltpu.HBM) for stack in stacks]
    return [stack for stack in stacks for _ in range(plan.together)]


def _scalars(first: Any, steps: Steps) -> tuple[jax.Array, ...]:
    of_steps = (each.reshape(-1) for each in steps[:3])
    return jnp.asarray(first, jnp.int32).reshape(1), *of_steps


def _precision(operand: jax.Array) -> lax.Precision:
    return lax.Precision.HIGHEST if operand.dtype == jnp.float32 else lax.Precision.DEFAULT


def _compiler_params(chip: str, axes: int) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        dimension_semantics=("arbitrary",) * axes, vmem_limit_bytes=int(CHIPS[chip].vmem_bytes * 0.9)
    )


def _limit(chip: str) -> int:
    return int(CHIPS[chip].vmem_bytes * _SHARE)


def _check(x_BTI: jax.Array, stacks: Sequence[jax.Array], ids_B: jax.Array, axis: int) -> None:
    """Raise ValueError if rows, whose width is an axis of the stacks, and ids do not fit them."""
    for stack in stacks:
        if x_BTI.ndim != 3 or stack.ndim != 3 or stack.shape[axis] != x_BTI.shape[2] or ids_B.shape != x_BTI.shape[:1]:
            raise ValueError(
                f"low_rank: rows {x_BTI.shape}, ids {ids_B.shape} and a stack {stack.shape} do not fit each other"
            )
        if stack.dtype not in _DTYPES or (axis == 2 and x_BTI.dtype != stack.dtype):
            raise ValueError(
                f"low_rank: rows are {x_BTI.dtype} and a stack {stack.dtype}: both bfloat16 or both float32"
            )
