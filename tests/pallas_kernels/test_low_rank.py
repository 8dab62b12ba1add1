"""Products with a row's own low-rank pair are the reference's in any company; no pair that no row has is read."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.low_rank import add_up, fit_rows, project_down
from pallas_kernels.low_rank.cases import BLOCKS, CASES, NUMBER, down_case, up_case
from pallas_kernels.low_rank.reference import reference_down, reference_up
from pallas_kernels.low_rank.steps import NOBODY, list_steps
from pallas_kernels.schedule import Compiler
from pallas_kernels.tuning import format_shape, read_table
from tests.pallas_kernels.cached_attention import assert_no_races, random_array, relative_error

LOADED, LAYERS, INPUTS, OUTPUTS, RANKS = 6, 2, 256, 300, (8, 16)


@cache
def drawn(batch: int, tokens: int, dtype: str):
    """Return the second of two layers' inputs and outputs, and pairs; those of the first layer are no numbers."""
    rng = np.random.default_rng(batch)
    draw = partial(random_array, rng)
    downs = [draw((LAYERS * LOADED, rank, INPUTS), dtype) for rank in RANKS]
    up = draw((LAYERS * LOADED, RANKS[0], OUTPUTS), dtype)
    lost = np.arange(LAYERS * LOADED)[:, None, None] < LOADED
    *downs, up = (jnp.where(lost, jnp.nan, stack) for stack in (*downs, up))
    return draw((batch, tokens, INPUTS), dtype), downs, up, draw((batch, tokens, OUTPUTS), dtype)


def both(down, up, ids, given, **options):
    options = {"number": LOADED, "first": LOADED, **options}

    @jax.jit
    def run(x, downs, stack, base, ids):
        inner = down(x, downs, ids, **options)
        return inner, up(base, inner[0], stack, ids, **options)

    return run(*given, ids)


def check(ids, tokens: int, dtype: str, **options):
    given, ids = drawn(len(ids), tokens, dtype), np.array(ids, np.int32)
    options = {"interpret": True, **options}
    inner, found = both(project_down, add_up, ids, given, **options)
    of_reference, expected = both(reference_down, reference_up, ids, given)
    for one, other in zip(inner, of_reference):
        np.testing.assert_allclose(np.asarray(one)[ids >= 0], np.asarray(other)[ids >= 0], rtol=1e-4, atol=1e-3)
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    assert relative_error(np.asarray(found, np.float32), np.asarray(expected, np.float32)) < tolerance
    np.testing.assert_array_equal(np.asarray(found)[ids < 0], np.asarray(given[3])[ids < 0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("ids", "tokens", "rows"),
    [
        ([3], 1, None),
        ([0, -1, 5, 0, 2, 1, 4, 3, -1], 3, 16),  # blocks that cut rows, and hold more adapters than a step
        ([4, 4, -1], 32, 16),  # rows of several blocks
        ([-1, -1, -1], 17, 16),
        (list(range(6)) * 11, 1, 64),
    ],
)
def test_every_row_gets_its_own_product(ids, tokens, rows, dtype):
    check(ids, tokens, dtype, rows=rows)


@pytest.mark.exhaustive
def test_steps_do_not_race_and_read_no_adapter_that_no_row_has():
    ids = [0, -1, 5, 0, 2, -1, 5, 0, 2]
    given = drawn(len(ids), 3, "bfloat16")
    lost = ~np.isin(np.arange(LAYERS * LOADED), [LOADED + each for each in ids if each >= 0])[:, None, None]
    *downs, up = (jnp.where(lost, jnp.nan, stack) for stack in (*given[1], given[2]))
    mode = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    try:
        options = {"interpret": mode, "rows": 16}
        _, found = both(project_down, add_up, np.array(ids, np.int32), (given[0], downs, up, given[3]), **options)
        _, expected = both(reference_down, reference_up, np.array(ids, np.int32), given)
        assert relative_error(np.asarray(found, np.float32), np.asarray(expected, np.float32)) < 1e-2
        assert_no_races()
    finally:
        pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize("together", [1, 4])
def test_steps_meet_each_adapter_of_a_block_once_and_fetch_no_other(together):
    ids = np.array([[2, 2, -1, 7], [-1] * 4, [7, 0, 1, 2], [5, 5, 5, 5], [-1, -1, 3, -1]], np.int32)
    run = jax.jit(partial(list_steps, blocks=len(ids), most=4, together=together))
    steps = run(ids.reshape(-1))
    count = int(steps.count)
    rows, met, fetched = (np.asarray(each)[..., :count] for each in (steps.rows_I, steps.met_GI, steps.fetched_GI))
    listed = [(row, adapter) for row, of_step in zip(rows, met.T) for adapter in of_step if adapter != NOBODY]
    assert sorted(listed) == sorted({(row, each) for row, own in enumerate(ids) for each in own if each >= 0})
    assert (np.diff(rows) >= 0).all()
    assert count == sum(-(-len(set(own[own >= 0])) // together) for own in ids)
    # What is fetched where nobody is met was there before, or is the first.
    stays = np.where(np.arange(count) > 0, np.roll(fetched, 1, axis=1), fetched[0, 0])
    assert (fetched == np.where(met == NOBODY, stays, met)).all()
    assert int(run(np.full(20, -1, np.int32)).count) == 1


def test_what_does_not_fit_is_refused_by_value():
    x, stack, ids = jnp.zeros((2, 1, 128)), jnp.zeros((3, 8, 128)), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=r"rows \(2, 1, 128\), ids \(3,\) and a stack \(3, 8, 128\) do not fit"):
        project_down(x, [stack], jnp.zeros(3, jnp.int32), number=3)
    with pytest.raises(ValueError, match="rows are float32 and a stack bfloat16"):
        project_down(x, [stack.astype(jnp.bfloat16)], ids, number=3)
    with pytest.raises(ValueError, match=r"rows \(2, 1, 8\), ids \(2,\) and a stack \(3, 16, 128\)"):
        add_up(x, jnp.zeros((2, 1, 8)), jnp.zeros((3, 16, 128)), ids, number=3)
    wide = jax.ShapeDtypeStruct((2, 1, 1 << 20), jnp.bfloat16), jax.ShapeDtypeStruct((3, 8, 1 << 20), jnp.bfloat16)
    assert fit_rows(2, 1, 1 << 20, 8, 2, "v4") == 0
    with pytest.raises(ValueError, match="ranks of 8 by 1048576 do not fit into the vector memory of v4"):
        jax.eval_shape(lambda x, stack: project_down(x, [stack], ids, number=3, chip="v4"), *wide)
    assert fit_rows(17, 1, 4096, 48, 2, "v5e") == 32


def test_the_cases_are_tuned():
    assert {format_shape(case.shape) for case in CASES} == set(read_table("low_rank")["v5e"])


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_a_step_on_v5e_reads_the_adapters_that_are_hit_and_waits_for_their_bytes(v5e):
    every = tuple(range(NUMBER))
    few, many = (down_case(4096, (16, 16, 16), ids) for ids in ((17, 3, 9, 30), every))
    read = {case.name: v5e.schedule(case.function, case.arguments, **BLOCKS[0]) for case in (few, many)}
    for case in (few, many):
        assert case.floor_bytes <= read[case.name].hbm_bytes < 1.01 * case.floor_bytes
    assert read[few.name].hbm_bytes < read[many.name].hbm_bytes / 7
    kernel = sum(each.cycles for each in read[many.name].operations if each.name.startswith("low_rank"))
    assert kernel / 1.5e9 < read[many.name].memory_seconds


@pytest.mark.exhaustive
@pytest.mark.tpu_compile
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chip", ["v4", "v5p", "v6e", "tpu7x"])
def test_real_sizes_compile_for_every_chip(chip, dtype):
    ids = (5, -1, 30, 5, 7, 8, 9)
    with Compiler(chip) as compiler:
        for case in (
            down_case(4096, (8, 8, 8), ids, dtype=dtype),
            down_case(11008, (32,), ids, 9, dtype=dtype),
            up_case(8, 11008, ids, dtype=dtype),
            up_case(64, 32003, ids, 9, dtype=dtype),
        ):
            schedule = compiler.schedule(case.function, case.arguments, donated=case.donated)
            assert any(operation.name.startswith("low_rank") for operation in schedule.operations)
