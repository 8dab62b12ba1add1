"""take_columns against its reference, in interpret mode, and compiled for TPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.schedule import Compiler
from pallas_kernels.take_columns import take_columns
from pallas_kernels.take_columns.cases import BLOCKS, CASES, take_case
from pallas_kernels.take_columns.reference import reference_columns
from pallas_kernels.tuning import format_shape, read_table


def drawn(width: int, count: int) -> list[jax.Array]:
    """Return parts of every dtype, which hold any bits; some floats are no numbers."""
    rng = np.random.default_rng(width)
    whole = rng.integers(0, 1 << 32, (width, count), np.uint32)
    floats = jnp.asarray(whole.view(np.float32))
    eight, sixteen = jnp.asarray(whole.astype(np.int8)), jnp.asarray(whole.astype(np.int16))
    signed, unsigned = (jnp.asarray((whole & 15).astype(np.uint8)).astype(each) for each in (jnp.int4, jnp.uint4))
    return [eight, sixteen[: width // 64], floats[: width // 64], signed, unsigned, eight.astype(jnp.uint8)]


def bits(array: jax.Array) -> np.ndarray:
    found = np.asarray(array)
    return found.view(np.uint32) if found.dtype == np.float32 else found


@pytest.mark.parametrize(
    ("width", "count", "columns"),
    [
        (192, 200, [0, 199, 127, 128, 5, 5]),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((64, 100, [99]), (640, 128, [127, 0]), (128, 1, [0, 0]), (256, 384, list(range(383, -1, -1))))
        ),
    ],
)
def test_columns_come_as_rows_in_their_own_bits(width, count, columns):
    """Of every dtype, also where a table ends within a tile, and where the last rows are fewer than a block."""
    parts, columns_T = drawn(width, count), jnp.asarray(columns, jnp.int32)
    run = jax.jit(functools.partial(take_columns, rows=128, interpret=True))
    for found, expected in zip(run(parts, columns_T), reference_columns(parts, columns_T), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(bits(found), bits(expected))


def test_no_columns_are_no_rows():
    codes, scales = take_columns(drawn(128, 8)[:2], jnp.zeros((0,), jnp.int32), interpret=True)
    assert (codes.shape, scales.shape, codes.dtype) == ((0, 128), (0, 2), jnp.int8)


def test_what_does_not_fit_is_refused_by_value():
    codes, one = jnp.zeros((64, 8), jnp.int8), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match=r"parts \[\(64, 8\), \(1, 9\)\] must be matrices of as many columns"):
        take_columns([codes, jnp.zeros((1, 9), jnp.int16)], one)
    with pytest.raises(ValueError, match=r"parts \[\] must be"):
        take_columns([], one)
    with pytest.raises(ValueError, match="a part of bfloat16 is not supported: use int4"):
        take_columns([codes, jnp.zeros((1, 8), jnp.bfloat16)], one)
    with pytest.raises(ValueError, match=r"columns \(1, 1\) must be one list"):
        take_columns([codes], one[None])


def test_the_cases_are_tuned():
    assert {format_shape(case.shape) for case in CASES} == set(read_table("take_columns")["v5e"])


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_a_step_on_v5e_reads_the_tiles_of_its_tokens(v5e):
    case = take_case("llama-3.2-1b int8", 2048, 64, 128256, 8, jnp.int8, (jnp.int16,))
    schedule = v5e.schedule(case.function, case.arguments, **BLOCKS[-1])
    assert case.floor_bytes <= schedule.hbm_bytes < 1.05 * case.floor_bytes
    assert schedule.temporary_bytes < case.floor_bytes
    kernel = sum(each.cycles for each in schedule.operations if each.name.startswith("take_columns"))
    assert kernel / 1.5e9 < 1.3 * schedule.memory_seconds


@pytest.mark.slow
@pytest.mark.tpu_compile
@pytest.mark.parametrize("others", [(jnp.int16,), (jnp.int8, jnp.float32)])
def test_one_scale_a_row_compiles(v5e, others):
    """The compiler turns no matrix of one row, as scales are of rows of one group."""
    case = take_case("one group", 64, 64, 1000, 3, jnp.int8, others)
    assert v5e.schedule(case.function, case.arguments).operations


@pytest.mark.exhaustive
@pytest.mark.tpu_compile
@pytest.mark.parametrize("chip", ["v4", "v5p", "v6e", "tpu7x"])
def test_real_sizes_compile_for_every_chip(chip):
    with Compiler(chip) as compiler:
        for codes, others in ((jnp.int8, (jnp.int16,)), (jnp.uint4, (jnp.int16, jnp.float32))):
            case = take_case("odd", 576, 32, 32003, 17, codes, others)
            schedule = compiler.schedule(case.function, case.arguments)
            assert any(operation.name.startswith("take_columns") for operation in schedule.operations)
