"""Products of rows with the kernels of their experts."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chips import CHIPS
from pallas_kernels.grouped_matmul import fit_rows, grouped_matmul
from pallas_kernels.grouped_matmul.cases import CASES, MIXTRAL, QWEN3_30B, gated, make_case
from pallas_kernels.grouped_matmul.op import list_steps
from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference
from pallas_kernels.measure import best_rival, case_floor
from pallas_kernels.schedule import Compiler
from pallas_kernels.tuning import format_shape, read_table
from tests.pallas_kernels.cached_attention import assert_no_races, relative_error

EXPERTS, LAYERS, WIDTH, CHANNELS, ROWS = 5, 2, 256, 300, 16
# No block, one and several; two that are not run.
BLOCKS, COUNT = np.array([0, 0, 2, 3, 3, 3, 4, 4], np.int32), 6


@cache
def draw(dtype: str):
    """Return rows, the kernels of two layers' experts, and biases."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(len(BLOCKS) * ROWS, WIDTH)).astype(jnp.dtype(dtype))
    shape = (LAYERS * EXPERTS, CHANNELS, WIDTH)
    gate, up = (rng.normal(size=shape).astype(jnp.dtype(dtype)) / jnp.dtype(dtype).type(16) for _ in range(2))
    return x, gate, up, [rng.normal(size=(EXPERTS, CHANNELS)).astype(np.float32) for _ in range(2)]


@cache
def compiled(function, is_biased: bool, is_pair: bool, **options):
    """Return a product of one layer's experts, in float32."""
    combine = gated if is_pair else None

    @jax.jit
    def run(x, gate, up, biases, blocks, count):
        kernels = [gate, up] if is_pair else [gate]
        own = biases[: len(kernels)] if is_biased else None
        named = {"first_expert": EXPERTS, "biases": own, "combine": combine, "rounded_to": jnp.float32}
        return function(x, kernels, blocks, count, **named, **options)

    return run


by_kernel = partial(compiled, grouped_matmul, block_f=128, interpret=True)
by_reference = partial(compiled, grouped_matmul_reference)


@pytest.mark.parametrize(
    ("dtype", "is_biased", "is_pair"),
    [
        ("bfloat16", True, True),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("float32", False, False), ("float32", True, False), ("bfloat16", False, True))
        ),
    ],
)
def test_every_row_is_multiplied_by_its_experts_kernels(dtype, is_biased, is_pair):
    given = *draw(dtype), BLOCKS, COUNT
    found, expected = (np.asarray(each(is_biased, is_pair)(*given)) for each in (by_kernel, by_reference))
    assert found.shape == (len(BLOCKS) * ROWS, CHANNELS)
    assert relative_error(found[: COUNT * ROWS], expected[: COUNT * ROWS]) < 1e-5


def test_a_row_does_not_see_the_others_nor_where_it_lies():
    """The fourth block and the fifth are of one expert."""
    x, *given = draw("bfloat16")
    run = by_kernel(True, True)
    found = np.asarray(run(x, *given, BLOCKS, COUNT))
    moved = 1000 * x
    moved[4 * ROWS + 3] = x[3 * ROWS + 5]
    again = np.asarray(run(moved, *given, BLOCKS, COUNT))
    np.testing.assert_array_equal(again[4 * ROWS + 3], found[3 * ROWS + 5])
    assert (again[3 * ROWS + 5] != found[3 * ROWS + 5]).any()


def test_steps_do_not_race_and_read_no_expert_without_rows():
    """Outputs start as not-a-number, as experts of other layers and without rows are."""
    x, gate, up, biases = draw("bfloat16")
    expected = np.asarray(by_reference(True, True)(x, gate, up, biases, BLOCKS, COUNT))
    lost = np.ones((LAYERS * EXPERTS, 1, 1), bool)
    lost[[EXPERTS + expert for expert in (0, 2, 3)]] = False
    gate, up = (np.where(lost, np.nan, kernel.astype(np.float32)).astype(jnp.bfloat16) for kernel in (gate, up))
    pltpu.reset_tpu_interpret_mode_state()
    mode = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    run = compiled(grouped_matmul, True, True, block_f=256, interpret=mode)
    found = np.asarray(run(x, gate, up, biases, BLOCKS, COUNT))
    assert relative_error(found[: COUNT * ROWS], expected[: COUNT * ROWS]) < 1e-5
    assert np.isnan(found[COUNT * ROWS :]).all()
    assert_no_races()
    pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize("count", [0, 1, 6, 8])
def test_a_block_of_a_kernel_is_fetched_once_and_everything_computed_once(count):
    steps = jax.jit(list_steps, static_argnums=2)(BLOCKS, count, 3)
    run = int(steps.count)
    assert run == 3 * max(count, 1)
    listed = np.stack([np.asarray(each)[:run] for each in (steps.expert_I, steps.outputs_I, steps.rows_I)], 1)
    assert (BLOCKS[listed[:, 2]] == listed[:, 0]).all()
    wanted = {(block, outputs) for block in range(max(count, 1)) for outputs in range(3)}
    assert {(block, outputs) for _, outputs, block in listed.tolist()} == wanted
    fetched = 1 + (listed[1:, :2] != listed[:-1, :2]).any(1).sum()
    assert fetched == len(np.unique(listed[:, :2], axis=0))


def test_as_many_rows_fit_as_vector_memory_has_room_for():
    assert fit_rows(1, 2048, 2, 2, "v5e") == 8
    assert fit_rows(100, 4096, 2, 2, "v5e") == 128
    assert fit_rows(1 << 20, 4096, 2, 2, "v5e") == 256
    assert 8 <= fit_rows(256, 14336, 1, 2, "v4") < 256
    assert fit_rows(16, 1 << 20, 2, 2, "v4") == 0
    of_v4 = partial(one_product, jnp.zeros(1, jnp.int32), jnp.int32(1), chip="v4")
    described = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 1 << 16), (2, 128, 1 << 16))]
    with pytest.raises(ValueError, match=r"256 rows of 65536 numbers do not fit into the vector memory of v4"):
        jax.eval_shape(of_v4, *described)


def one_product(blocks, count, x, kernel, **options):
    return grouped_matmul(x, [kernel], blocks, count, **options)


def one(x=(32, 256), kernel=(2, 128, 256), dtype=jnp.bfloat16, blocks=2, others=(), **options):
    kernels = [jnp.ones(kernel, jnp.bfloat16), *(jnp.ones(other, jnp.bfloat16) for other in others)]
    return grouped_matmul(jnp.ones(x, dtype), kernels, jnp.zeros(blocks, jnp.int32), jnp.int32(blocks), **options)


BAD = {
    "width": (partial(one, x=(32, 128)), r"rows \(32, 128\) and kernels \(2, 128, 256\) must be \[Y, D\]"),
    "dtype": (partial(one, dtype=jnp.float32), "rows are float32 and kernels bfloat16"),
    "blocks": (partial(one, blocks=3), "32 rows are not 3 blocks of a multiple of 8"),
    "alike": (partial(one, others=[(2, 256, 256)]), "kernels must be alike"),
    "combine": (partial(one, others=[(2, 128, 256)]), "several kernels, and only they, need combine"),
    "biases": (partial(one, biases=[jnp.ones((2, 64))]), r"biases must be \[E, 128\]"),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD)
def test_what_does_not_fit_together_is_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_the_cases_are_tuned():
    assert {format_shape(case.shape) for case in CASES} == set(read_table("grouped_matmul")["v5e"])


@pytest.mark.tpu_compile
def test_decode_on_v5e_is_bound_by_reading_each_expert_once(v5e):
    case = make_case(QWEN3_30B, 64, 8)
    schedule = v5e.schedule(case.function, case.arguments)
    assert case.floor_bytes <= schedule.hbm_bytes < 1.02 * case.floor_bytes
    assert schedule.cycles / 1.5e9 < case_floor(case, CHIPS["v5e"]).hbm_seconds


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("case", "ratio"),
    [
        pytest.param(make_case(MIXTRAL, 2048, 128), 0.9, marks=pytest.mark.exhaustive),
        pytest.param(make_case(QWEN3_30B, 512, 32), 1.0, marks=pytest.mark.exhaustive),
        pytest.param(make_case(MIXTRAL, 2048, 128, True), 0.9, marks=pytest.mark.exhaustive),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else str(value),
)
def test_no_more_time_than_megablox_at_its_best_of_three_tilings(v5e, case, ratio):
    schedule = v5e.schedule(case.function, case.arguments)
    (rival,) = case.rivals
    beaten, _ = best_rival(replace(case, rivals=(replace(rival, blocks=rival.blocks[2:]),)), v5e)
    assert beaten is not None
    seconds = [max(each.cycles / 1.5e9, each.memory_seconds) for each in (schedule, beaten.schedule)]
    assert seconds[0] < ratio * seconds[1]


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("chip", "case"),
    [
        pytest.param("tpu7x", make_case(QWEN3_30B, 64, 8, True), marks=pytest.mark.slow),
        *(
            pytest.param(chip, make_case(MIXTRAL, 512, 128, is_down), marks=pytest.mark.exhaustive)
            for chip in ("v4", "v5p", "v6e", "tpu7x")
            for is_down in (False, True)
            if (chip, is_down) != ("v4", True)
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_real_sizes_compile_for_every_chip(chip, case):
    with Compiler(chip) as compiler:
        schedule = compiler.schedule(case.function, case.arguments)
    assert any(operation.name.startswith("grouped_matmul") for operation in schedule.operations)
