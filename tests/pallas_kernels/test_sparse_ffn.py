"""Products over live blocks have the bits of those over all blocks, and read no other block."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chips import CHIPS
from pallas_kernels.measure import case_floor
from pallas_kernels.schedule import Compiler
from pallas_kernels.sparse_ffn import LiveBlocks, fits, live_inputs, live_outputs
from pallas_kernels.sparse_ffn import list_blocks as list_eagerly
from pallas_kernels.sparse_ffn.cases import CASES, make_case
from pallas_kernels.sparse_ffn.reference import live_inputs_reference, live_outputs_reference
from pallas_kernels.tuning import format_shape, read_table
from tests.pallas_kernels.cached_attention import assert_no_races, relative_error

# Of five blocks the last is cut, and one on each side of it is dead.
ROWS, WIDTH, UNITS, LAYERS = 17, 72, 600, 2
DEAD = (0, 3)
ALL = LiveBlocks(np.arange(5, dtype=np.int32), np.int32(5))
list_blocks = jax.jit(list_eagerly)


@cache
def draw(dtype: str):
    """Return hidden units with dead blocks, a layer's inputs, and the kernels of two layers' down and up."""
    rng = np.random.default_rng(0)
    hidden, x = rng.normal(size=(ROWS, UNITS)), rng.normal(size=(ROWS, WIDTH))
    hidden[rng.random(hidden.shape) < 0.7] = 0
    for block in DEAD:
        hidden[:, 128 * block : 128 * (block + 1)] = -0.0 if block else 0.0
    down, up = rng.normal(size=(LAYERS, WIDTH, UNITS)), rng.normal(size=(LAYERS, UNITS, WIDTH))
    return tuple(each.astype(jnp.dtype(dtype)) for each in (hidden, x, down, up))


@cache
def run(function, interpret=True, **options):
    """Return a product with the second layer."""
    if function in (live_inputs, live_outputs):
        options["interpret"] = interpret
    return jax.jit(partial(function, layer=1, **options))


def without_the_dead(down, up):
    """Return kernels whose dead blocks, and whose other layer, are not a number."""
    down, up = np.array(down, np.float32), np.array(up, np.float32)
    down[0], up[0] = np.nan, np.nan
    for block in DEAD:
        units = slice(128 * block, 128 * (block + 1))
        down[:, :, units], up[:, units] = np.nan, np.nan
    return down, up


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("together", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_products_are_those_of_all_blocks_in_every_bit_and_read_the_live_ones(dtype, together):
    hidden, x, down, up = draw(dtype)
    live = list_blocks(hidden)
    assert np.asarray(live.index_I)[: int(live.count)].tolist() == [1, 2, 4]
    nan_down, nan_up = (each.astype(dtype) for each in without_the_dead(down, up))

    found = np.asarray(run(live_inputs, together=together)(hidden, nan_down, live))
    assert relative_error(found, np.asarray(run(live_inputs_reference)(hidden, down, ALL))) < 1e-5
    whole = np.asarray(run(live_inputs, together=together)(hidden, down, ALL))
    np.testing.assert_array_equal(found.view(np.int32), whole.view(np.int32))
    if together == 1:
        # Blocks read together are added one by one.
        np.testing.assert_array_equal(np.asarray(run(live_inputs, together=2)(hidden, down, live)), found)

    found = np.asarray(run(live_outputs, together=together)(x, nan_up, live))
    expected = np.asarray(run(live_outputs_reference)(x, up, live))
    assert relative_error(found, expected) < 1e-5
    assert found.shape == (ROWS, UNITS)
    assert not found[:, [*range(128), *range(384, 512)]].any()


def test_a_row_has_the_bits_that_it_has_alone():
    """Alone, fewer blocks are live."""
    hidden, _, down, _ = draw("bfloat16")
    hidden = np.array(hidden)
    hidden[3, 128:256] = 0
    whole = np.asarray(run(live_inputs, together=2)(hidden, down, list_blocks(hidden)))
    alone = list_blocks(hidden[3:4])
    assert int(alone.count) == 2
    np.testing.assert_array_equal(np.asarray(run(live_inputs, together=2)(hidden[3:4], down, alone))[0], whole[3])


def test_a_sum_that_underflows_has_the_sign_that_it_has_with_blocks_of_zeros():
    """Where numbers below the smallest normal one are zeros, as on a TPU, the sum of the two blocks is -0."""
    hidden, _, down, _ = draw("bfloat16")
    hidden, down = np.zeros_like(hidden), np.zeros_like(down)
    hidden[:, [128, 256]] = 1
    down[:, :, 128], down[:, :, 256] = -1.5e-38, 1.25e-38
    found, whole = (np.asarray(run(live_inputs, together=2)(hidden, down, live)) for live in (list_blocks(hidden), ALL))
    np.testing.assert_array_equal(found.view(np.int32), whole.view(np.int32))


@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
def test_the_list_is_the_blocks_with_a_unit_that_is_not_zero(share):
    rng = np.random.default_rng(2)
    hidden = np.where(rng.random((3, 1000)) < share / 3, rng.normal(size=(3, 1000)), 0)
    hidden[0, 777] = np.nan
    live = [block for block in range(8) if (hidden[:, 128 * block : 128 * (block + 1)] != 0).any()]
    found = list_blocks(hidden)
    assert int(found.count) == len(live) > 0
    np.testing.assert_array_equal(found.index_I, live + [0] * (8 - len(live)))


@pytest.mark.slow
def test_steps_do_not_race_and_write_zeros_where_no_block_is_live():
    """Outputs start as not-a-number."""
    hidden, x, down, up = draw("bfloat16")
    expected = np.asarray(run(live_inputs_reference)(hidden, down, ALL))
    pltpu.reset_tpu_interpret_mode_state()
    mode = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    by_inputs, by_outputs = (run(each, mode, together=2) for each in (live_inputs, live_outputs))
    assert relative_error(np.asarray(by_inputs(hidden, down, list_blocks(hidden))), expected) < 1e-5
    nothing = list_blocks(np.zeros_like(hidden))
    assert not np.asarray(by_inputs(hidden, down, nothing)).any()
    assert not np.asarray(by_outputs(x, up, nothing)).any()
    assert_no_races()
    pltpu.reset_tpu_interpret_mode_state()


def one(hidden=(4, 256), kernel=(64, 256), dtype=jnp.bfloat16, blocks=2, **options):
    live = LiveBlocks(np.zeros(blocks, np.int32), np.int32(blocks))
    return live_inputs(jnp.ones(hidden, dtype), jnp.ones(kernel, jnp.bfloat16), live, interpret=True, **options)


BAD = {
    "width": (partial(one, hidden=(4, 128)), r"rows \(4, 128\) do not fit a kernel \(64, 256\)"),
    "rows": (partial(one, hidden=(65, 256)), "65 rows are not 1 to 64"),
    "none": (partial(one, hidden=(0, 256)), "0 rows are not 1 to 64"),
    "dtype": (partial(one, dtype=jnp.float32), "rows are float32, the kernel bfloat16"),
    "list": (partial(one, blocks=3), r"256 units are 2 blocks, the list is \(3,\)"),
    "memory": (partial(one, kernel=(1 << 16, 256), chip="v4"), "do not fit into v4's vector memory"),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD)
def test_what_does_not_fit_together_is_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        jax.eval_shape(call)
    assert "\n" not in str(caught.value)


def test_as_many_rows_fit_as_the_kernel_takes():
    assert fits(64, 4096, 11008, "bfloat16", "v5e")
    assert not fits(65, 4096, 11008, "bfloat16", "v5e")
    assert not fits(16, 1 << 16, 1 << 18, "float32", "v4")


def test_the_cases_are_tuned():
    assert {format_shape(case.shape) for case in CASES} == set(read_table("sparse_ffn")["v5e"])


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    "case",
    [
        make_case(16, 4096, 11008, 0.25),
        *(
            pytest.param(make_case(16, 4096, 11008, *rest), marks=pytest.mark.slow)
            for rest in ((0.5, True), (1.0, False))
        ),
    ],
    ids=lambda case: case.name,
)
def test_on_v5e_bytes_are_those_of_the_live_blocks_and_take_the_longest(v5e, case):
    schedule = v5e.schedule(case.function, case.arguments)
    assert case.floor_bytes <= schedule.hbm_bytes < 1.01 * case.floor_bytes
    assert schedule.cycles / 1.5e9 < case_floor(case, CHIPS["v5e"]).hbm_seconds


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("chip", "case"),
    [
        pytest.param(chip, make_case(64, 4096, 1376, 0.5, is_up, dtype), marks=pytest.mark.exhaustive)
        for chip in ("v4", "v5p", "v6e", "tpu7x")
        for is_up, dtype in ((False, jnp.float32), (True, jnp.bfloat16))
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_real_sizes_compile_for_every_chip(chip, case):
    with Compiler(chip) as compiler:
        schedule = compiler.schedule(case.function, case.arguments)
    assert any(operation.name.startswith("sparse_ffn") for operation in schedule.operations)
