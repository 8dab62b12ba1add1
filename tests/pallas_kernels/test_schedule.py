"""Schedules of small programs, counted by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bundles import read_bundles
from pallas_kernels.chips import CHIPS
from pallas_kernels.scalar_unit import ScheduleError, run_scalar_unit
from pallas_kernels.schedule import Compiler, Operation, Schedule, compile_schedule
from tests.pallas_kernels import small_kernels

# Larger than vector memory's part that the compiler would fetch whole operands into.
LARGE = jax.ShapeDtypeStruct((1 << 16, 512), jnp.float32)
LARGE_BYTES = 4 * 512 << 16
OTHERS = ("v4", "v6e", "v5p", "tpu7x")

TEXT = """= control target key start
LB: loop body
= control target key end

     0   :  { %s1_s0 = inlined_call_operand.hbm [shape: s32[5], index: 0, kind: input, shape index: {}] /* n */  ;;
  %s2_s1 = inlined_call_operand.<no memory space> [shape: s32[1], index: 1, kind: input, shape index: {}]  ;;
  %s3_s2 = smov [#allocation5] }
   0x1   :  { %s4_s0 = sshll.u32 %s1_s0, 4  ;;  %s5_s0 = int_to_ptr.hbm [resolvable:$true] %s4_s0 }
   0x2   :  { %6 = dma.hbm_to_smem /*hbm=*/%s5_s0, /*size_in_granules=*/16, /*smem=*/%s3_s2 }
   0x3   :  { %s7_s3 = smov 0  ;;  %v1_v0 = vmov 0.0 } /* Start region 1 */
   0x4 LB: > { %s8_s4 = sld [smem:[#allocation5 + %s7_s3]]  ;;  %s7_s3 = sphi %s7_s3, %s9_s3 }
   0x5   : > {}
   0x6   : > { %p1_p0 = scmp.le.s32.totalorder %s8_s4, 0 }
   0x7   : > { %10 = sbr.rel (%p1_p0) target bundleno = 14 (0xe), region = 2 }
   0x8   :  {}
   0x9   :  {}
   0xa   : > { %s9_s3 = sadd.s32 1, %s7_s3 }
   0xb   :  {}
   0xc   : > { %12 = dma.hbm_to_vmem [thread:$0]  (!%p1_p0), /*hbm=*/%s5_s0, /*size_in_granules=*/100, /*vmem=*/0 /*
base_bounds: (8, 1) */ }
   0xd   : > { %v2_v1 = vmatmul.bf16.gmra.mxu0 %v1_v0 }
   0xe PF: > { %p2_p1 = scmp.ge.s32.totalorder %s9_s3, %s2_s1 /* loop exit test */ }
   0xf   : > { %13 = sbr.rel (!%p2_p1) target bundleno = 4 (0x4), region = 1 }
  0x10   :  {}
  0x11   :  {}
  0x12   :  {}
  0x13   :  {}
  0x14   :  { %14 = vsyncpa [#allocation6], 1 } /* exit bundle */
"""


def the_kernel(schedule: Schedule) -> Operation:
    """Return the one operation that is longer than a conversion."""
    return max(schedule.operations, key=lambda operation: operation.cycles)


def test_bundles_written_by_hand_run_as_often_as_their_branches_say():
    """Five items, two of them empty; two of the six bundles that an empty one skips are past the branch's slots."""
    bundles = read_bundles(TEXT)
    assert len(bundles) == 21
    assert [address for address, bundle in enumerate(bundles) if bundle.empty] == [5, 8, 9, 11, 16, 17, 18, 19]
    lengths = np.array([3, 0, 2, 0, 1], np.int32)
    run = run_scalar_unit(bundles, [lengths, np.array([5], np.int32)], branch_slots=4)
    assert dict(run.counts) == {0: 1, 4: 5, 12: 3, 14: 5, 20: 1}
    assert (
        sum((run.ends[start] - start) * count for start, count in run.counts.items()) == 4 + 5 * 8 + 3 * 2 + 5 * 6 + 1
    )
    assert run.hbm_bytes == (16 + 3 * 100) * 32


def test_a_branch_on_what_is_not_given_is_refused_by_what_to_do():
    with pytest.raises(ScheduleError, match="depends on data that is not given: pass it as a NumPy array"):
        run_scalar_unit(read_bundles(TEXT), [None, np.array([5], np.int32)], branch_slots=4)


@pytest.mark.tpu_compile
@pytest.mark.parametrize("steps", [32, pytest.param(64, marks=pytest.mark.slow)])
def test_a_grid_runs_its_steps_and_moves_its_blocks_once(v5e, steps):
    """Two steps more than the grid has: one before its first output is written back, one to fetch ahead."""
    schedule = v5e.schedule(small_kernels.double, [LARGE], steps=steps)
    kernel = the_kernel(schedule)
    assert kernel.grid_steps == steps + 2
    assert kernel.busiest.runs == steps
    assert schedule.hbm_bytes == 2 * LARGE_BYTES
    # Three loads and one store of 8 x 128 numbers a cycle: the stores decide.
    stores = LARGE_BYTES // (8 * 128 * 4)
    assert kernel.slots["VSTORE"] * kernel.cycles == pytest.approx(stores)
    assert stores < kernel.cycles < 1.5 * stores
    assert schedule.compute_seconds == pytest.approx(schedule.cycles / 1.5e9)
    assert schedule.seconds == schedule.memory_seconds == pytest.approx(2 * LARGE_BYTES / 819e9)


@pytest.mark.tpu_compile
def test_skipped_blocks_are_counted_as_skipped(v5e):
    side = 16
    schedule = v5e.schedule(
        small_kernels.double_lower_triangle, [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)], side=side
    )
    kernel = the_kernel(schedule)
    computed = side * (side + 1) // 2
    assert kernel.grid_steps == side**2 + 2
    assert kernel.busiest.runs == computed
    assert schedule.hbm_bytes == 2 * computed * (4096 // side) ** 2 * 4


@pytest.mark.tpu_compile
@pytest.mark.parametrize("chip", ["v5e", *(pytest.param(chip, marks=pytest.mark.slow) for chip in OTHERS)])
def test_work_follows_the_lengths_that_are_given(chip, request):
    lengths = np.array([300, 0, 128, 1000, 2048], np.int32)
    parts = 3 + 0 + 1 + 8 + 16
    rows = jax.ShapeDtypeStruct((16, 5, 2048, 512), jnp.float32)
    described = small_kernels.sum_to_lengths, [lengths, np.array([7], np.int32), rows]
    if chip == "v5e":
        schedule = request.getfixturevalue("v5e").schedule(*described)
    else:
        schedule = compile_schedule(*described, chip)
    kernel = the_kernel(schedule)
    (inner,) = [loop for loop in kernel.loops if loop.depth == 2]
    assert inner.runs == parts
    fetched = parts * small_kernels.ROWS * 512 * 4
    scalars = 2 * 512  # what of lengths and layer comes from HBM is a row of 128 each
    assert fetched + 5 * 8 * 512 * 4 <= schedule.hbm_bytes <= fetched + 5 * 8 * 512 * 4 + scalars
    assert (schedule.seconds is None) == (CHIPS[chip].clock_hz is None)


@pytest.mark.tpu_compile
@pytest.mark.parametrize("shifted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_table_of_two_dimensions_is_found_as_it_lies_in_memory(v5e, shifted):
    """Page 0 is skipped, and a page that follows itself is not fetched again."""
    table = np.zeros((10, 200), np.int32)
    table[0, :3] = [4, 4, 7]
    table[9, 199] = 5
    pages = jax.ShapeDtypeStruct((4096, 32, 512), jnp.float32)
    function = small_kernels.sum_pages_of_shifted_table if shifted else small_kernels.sum_pages
    if shifted:
        table -= 1
    schedule = v5e.schedule(function, [table, pages])
    kernel = the_kernel(schedule)
    block_runs = {block.runs for block in kernel.blocks}
    if shifted:
        assert 10 * 200 in block_runs
    else:
        assert 4 in block_runs
        fetches = 2 + 2 + 1  # pages 4 and 7, page 0 until the last, page 5, and page 0 is there at the start of a row
        assert kernel.hbm_bytes == (fetches - 1 + 10) * 32 * 512 * 4 + 16 * 256 * 4


@pytest.mark.tpu_compile
def test_the_matrix_units_use_grows_with_the_rows(v5e):
    """A unit multiplies one row by a tile of 128 x 128 weights a cycle; four units share the sixteen tiles."""
    weights = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    used = []
    for rows in (512, 1024):
        argument = jax.ShapeDtypeStruct((rows, 512), jnp.bfloat16)
        kernel = the_kernel(v5e.schedule(small_kernels.multiply, [argument, weights]))
        used.append(kernel.slots["MXU"] * 4 * kernel.cycles)
        assert 0 < kernel.slots["MXU"] < 1
    assert used[1] - used[0] == pytest.approx(512 * 16)


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("function", "argument", "message"),
    [
        (small_kernels.stop_by_data, (8, 128), "depends on data"),
        (small_kernels.too_large, (8, 128), "(?i)vmem"),
        (lambda x: x, (8, 128), "define it in a module"),
    ],
    ids=["data decides", "does not fit", "not picklable"],
)
def test_what_cannot_be_scheduled_says_why_in_one_line(v5e, function, argument, message):
    with pytest.raises(ScheduleError, match=message) as caught:
        v5e.schedule(function, [jax.ShapeDtypeStruct(argument, jnp.float32)])
    assert "\n" not in str(caught.value)


def test_an_unknown_chip_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown TPU 'v99': choose one of v4, v5e"):
        Compiler("v99")
