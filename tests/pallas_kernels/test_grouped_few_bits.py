"""Products of rows with the kernels of their experts in few bits, widened on the chip."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chips import CHIPS
from pallas_kernels.grouped_matmul import Codes, fit_rows, grouped_matmul
from pallas_kernels.grouped_matmul.cases import QWEN3_30B, gated, make_case
from pallas_kernels.grouped_matmul.codes import FLOAT4, FLOAT8, INTEGER, LEVELS, widened
from pallas_kernels.grouped_matmul.columns import one_float, pair_of_floats
from pallas_kernels.grouped_matmul.levels import one_level, pair_of_levels
from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference
from pallas_kernels.measure import case_floor
from pallas_kernels.schedule import Compiler
from tests.pallas_kernels.cached_attention import assert_no_races, relative_error

EXPERTS, CHANNELS = 3, 200
# An expert with two blocks, one without and one with one; a block that is not run.
BLOCKS, COUNT = np.array([0, 0, 2, 2], np.int32), 3
KINDS = ("int8", "e4m3", "int8/32", "e4m3/128", "int4/32", "int4/64", "int4/128", "e2m1/32", "levels/64", "zeros/128")
# Groups whose scales and minima are integers, 8 of which share a unit, or 16.
UNITS = ("minima8/32", "int8x16/16")
QUANTILES = (-1.0, -0.695, -0.524, -0.395, -0.285, -0.185, -0.0908, 0.0, *(0.0796, 0.161, 0.246, 0.338, 0.441, 0.5625))
QUANTILES += (0.723, 1.0)


@cache
def draw(kind: str, width: int, seed: int = 1) -> Codes:
    """Return the kernels of two layers' experts."""
    rng, (name, _, group) = np.random.default_rng(seed), kind.partition("/")
    experts = 2 * EXPERTS
    codes = rng.integers(-126, 127, (experts, CHANNELS, width)).astype(np.int8)
    codes[codes == -1] = 0  # is no number as a float
    what = name if name in (FLOAT8, FLOAT4) else INTEGER
    if not group:
        scales = rng.uniform(0.5, 1, (experts, CHANNELS)).astype(np.float32) / 64
        return Codes(jnp.asarray(codes), jnp.asarray(scales), kind=what)
    shape = (experts, width // int(group), CHANNELS)
    supers = 16 if name == "int8x16" else 8
    if name in ("int8", FLOAT8):
        scales = rng.uniform(0.5, 1, shape).astype(np.float32) / 64
        return Codes(jnp.asarray(codes.swapaxes(1, 2)), jnp.asarray(scales), kind=what)
    nibbles = jnp.asarray(codes.swapaxes(1, 2) & 15).astype(jnp.uint4)
    if name == FLOAT4:
        return Codes(nibbles, jnp.asarray(rng.integers(118, 126, shape).astype(np.uint8)), kind=what)

    def halves(factor: float, groups: int = shape[1]):
        drawn = rng.uniform(0.5, 1, (experts, groups, CHANNELS)).astype(np.float16)
        return jnp.asarray(drawn * np.float16(factor)).view(jnp.int16)

    def integers(low: int):
        return jnp.asarray(rng.integers(low, 63, shape).astype(np.int8))

    if name == "int8x16":
        units = halves(1 / 1024, shape[1] // supers)
        return Codes(jnp.asarray(codes.swapaxes(1, 2)), integers(-63), scale_units=units)
    if name == "minima8":
        units, of_minima = (halves(factor, shape[1] // supers) for factor in (1 / 256, -1 / 32))
        return Codes(nibbles, integers(1), integers(1), scale_units=units, minima_units=of_minima)
    scales = halves(0.125)
    if name == "levels":
        return Codes(nibbles, scales, kind=LEVELS, levels=QUANTILES)
    if name == "zeros":
        return Codes(nibbles, scales, zeros=jnp.asarray(rng.integers(1, 16, shape).astype(np.int8)))
    return Codes(nibbles, scales, halves(-1.0) if name == "minima" else None, offset=0 if name == "minima" else 8)


@pytest.mark.parametrize("index", [0, 3])
def test_every_level_is_widened_exactly(index):
    """By a look-up and by a choice among constants; in both halves of words, and one by one."""
    nibbles = np.random.default_rng(0).permutation(np.arange(8 * 128 * 8) % 16).reshape(8, 128, 8)
    words = (nibbles.astype(np.uint32) << (4 * np.arange(8, dtype=np.uint32))).sum(-1, dtype=np.uint32).view(np.int32)
    expected = np.array(QUANTILES, jnp.bfloat16)[nibbles]
    pairs = np.asarray(pair_of_levels(QUANTILES, jnp.asarray(words), index)).view(jnp.bfloat16).reshape(8, 128, 2)
    np.testing.assert_array_equal(pairs, expected[..., [index, index + 4]])
    for each in (index, index + 4):
        found = one_level(QUANTILES, jnp.asarray(words), each)
        np.testing.assert_array_equal(found, expected[..., each].astype(np.float32))


def rows(count: int, width: int) -> np.ndarray:
    drawn = np.random.default_rng(0).normal(size=(len(BLOCKS) * count, width))
    return drawn.astype(jnp.bfloat16)


@cache
def compiled(function, kind: str, width: int, is_pair: bool, **options):
    """Return a product of the second layer's experts, in float32."""
    kernels = [draw(kind, width, seed) for seed in ((1, 2) if is_pair else (1,))]
    biases = [np.random.default_rng(3).normal(size=(EXPERTS, CHANNELS)).astype(np.float32)] * len(kernels)
    combine = gated if is_pair else None

    @jax.jit
    def run(x, blocks, count):
        named = {"first_expert": EXPERTS, "biases": biases, "combine": combine, "rounded_to": jnp.float32}
        return function(x, kernels, blocks, count, **named, **options)

    return run


by_kernel = partial(compiled, grouped_matmul, block_f=128, interpret=True)
by_reference = partial(compiled, grouped_matmul_reference)


@pytest.mark.parametrize(
    ("kind", "count", "width", "is_pair"),
    [
        ("minima/64", 16, 256, False),
        pytest.param("minima/64", 16, 256, True, marks=pytest.mark.slow),
        pytest.param("minima8/32", 8, 256, False, marks=pytest.mark.slow),
        pytest.param("e2m1/32", 16, 192, False, marks=pytest.mark.slow),  # a tile that is not whole
        *(
            pytest.param(kind, count, width, False, marks=pytest.mark.exhaustive)
            for kind in KINDS
            for count, width in ((16, 256), (128, 256), (128, 320))
            if width == 256 or not kind.endswith("128")
        ),
        *(
            pytest.param(kind, count, 512, False, marks=pytest.mark.exhaustive)
            for kind in UNITS
            for count in (8, 16, 128)
        ),
        pytest.param("minima/64", 128, 320, True, marks=pytest.mark.slow),
    ],
)
def test_every_row_is_multiplied_by_what_its_experts_codes_stand_for(kind, count, width, is_pair):
    """As exactly as in float32, but for many rows and weights of small groups, which are rounded to bfloat16 first."""
    x = rows(count, width)
    found, expected = (np.asarray(each(kind, width, is_pair)(x, BLOCKS, COUNT)) for each in (by_kernel, by_reference))
    group = int(kind.partition("/")[2] or 128)
    # The rounding of powers of two changes nothing.
    is_rounded = group < 128 and count * (128 // group) > 64 and kind != "e2m1/32"
    error = relative_error(found[: COUNT * count], expected[: COUNT * count])
    assert error < (4e-3 if is_rounded else 1e-5)
    assert error > 1e-4 or not is_rounded


def test_a_row_does_not_see_the_others_nor_where_it_lies():
    """The first block and the second are of one expert, whose codes are widened for both."""
    run, x = by_kernel("minima/64", 256, False), rows(16, 256)
    found = np.asarray(run(x, BLOCKS, COUNT))
    moved = 1000 * x
    moved[16 + 3] = x[5]
    again = np.asarray(run(moved, BLOCKS, COUNT))
    np.testing.assert_array_equal(again[16 + 3], found[5])
    assert (again[5] != found[5]).any()


def test_every_float_of_four_bits_is_widened_exactly():
    """Four times as large; in pairs, zero is so small a number that no sum is changed by it."""
    levels = 4 * np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    nibbles = np.random.default_rng(0).permutation(np.arange(64) % 16).reshape(8, 8)
    words = jnp.asarray((nibbles.astype(np.uint32) << (4 * np.arange(8, dtype=np.uint32))).sum(1, dtype=np.uint32))
    words = jax.lax.bitcast_convert_type(words, jnp.int32)
    one = np.stack([one_float(words, index) for index in range(8)], 1)
    np.testing.assert_array_equal(one, levels[nibbles])
    pairs = np.stack([np.asarray(pair_of_floats(words, index)).view(jnp.bfloat16) for index in range(4)])
    found = pairs.reshape(4, 8, 2).transpose(1, 2, 0).reshape(8, 8).astype(np.float32)
    np.testing.assert_allclose(found, levels[nibbles], rtol=0, atol=1e-30)


@pytest.mark.slow
@pytest.mark.parametrize("count", [16, 32])
def test_every_float_of_four_bits_is_multiplied_exactly(count):
    """Rows that choose one weight each; in few rows and in many."""
    width = 128
    codes = jnp.broadcast_to((jnp.arange(width) % 16)[None, :, None], (1, width, 128)).astype(jnp.uint4)
    kernel = Codes(codes, jnp.full((1, 4, 128), 128, jnp.uint8), kind=FLOAT4)
    x = np.eye(width, dtype=np.float32).astype(jnp.bfloat16)
    blocks = np.zeros(width // count, np.int32)
    found = grouped_matmul(x, [kernel], blocks, len(blocks), block_f=128, interpret=True)
    expected = np.tile([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], width // 16)
    np.testing.assert_array_equal(np.asarray(widened(kernel))[0, 0], 2 * expected)
    # Zero is so small a number that no other is changed by it.
    np.testing.assert_allclose(np.asarray(found)[:, 7], 2 * expected, rtol=0, atol=1e-30)


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [16, 128])
def test_steps_do_not_race(count):
    x = rows(count, 256)
    expected = np.asarray(by_reference("minima/64", 256, True)(x, BLOCKS, COUNT))
    pltpu.reset_tpu_interpret_mode_state()
    mode = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    run = compiled(grouped_matmul, "minima/64", 256, True, block_f=128, interpret=mode)
    found = np.asarray(run(x, BLOCKS, COUNT))
    assert relative_error(found[: COUNT * count], expected[: COUNT * count]) < 4e-3
    assert_no_races()
    pltpu.reset_tpu_interpret_mode_state()


def codes_of(dtype=jnp.uint4, shape=(2, 256, 128), scales=(2, 4, 128), kind=INTEGER, minima=None, scale=jnp.float32):
    described = jnp.zeros(shape, jnp.int8).astype(dtype), jnp.ones(scales, scale), minima
    return Codes(*described, kind)


BAD = {
    "rows": (partial(codes_of), jnp.float32, "rows are float32, not bfloat16, which kernels in few bits multiply"),
    "kind": (partial(codes_of, jnp.int8, kind=FLOAT4), jnp.bfloat16, "codes of e2m1 are int8"),
    "groups": (partial(codes_of, scales=(2, 32, 128)), jnp.bfloat16, r"scales \(2, 32, 128\) are not those of groups"),
    "scales": (partial(codes_of, scale=jnp.bfloat16), jnp.bfloat16, "scales are bfloat16"),
    "minima": (partial(codes_of, minima=jnp.ones((2, 1, 128))), jnp.bfloat16, r"minima are float32\(2, 1, 128\)"),
    "units": (partial(codes_of, scale=jnp.int8), jnp.bfloat16, "scales are int8"),
    "levels": (partial(codes_of, kind=LEVELS), jnp.bfloat16, "codes of levels have 0 levels"),
    "channels": (
        partial(codes_of, shape=(2, 128, 256), scales=(2, 128)),
        jnp.bfloat16,
        r"codes \(2, 128, 256\) need float32 scales \[E, F\] and no minima",
    ),
}


@pytest.mark.parametrize(("kernel", "dtype", "message"), BAD.values(), ids=BAD)
def test_what_does_not_fit_together_is_refused_in_one_line(kernel, dtype, message):
    with pytest.raises(ValueError, match=message) as caught:
        grouped_matmul(jnp.ones((32, 256), dtype), [kernel()], jnp.zeros(2, jnp.int32), jnp.int32(2))
    assert "\n" not in str(caught.value)


def test_rows_that_fit_beside_widened_codes_are_fewer():
    form = draw("int4/64", 256).form
    assert fit_rows(128, 4096, 2, 2, "v5e", form) == 128
    assert fit_rows(256, 14336, 1, 2, "v4", form) < fit_rows(256, 14336, 1, 2, "v5e", form)
    assert fit_rows(16, 1 << 20, 2, 2, "v4", form) == 0


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("kind", "most"),
    [
        pytest.param("int4/64", 0.5, marks=pytest.mark.slow),
        *(
            pytest.param(kind, most, marks=pytest.mark.exhaustive)
            # Any levels are widened by four times as much vector work as integers.
            for kind, most in (("e4m3/128", 0.6), ("int8/32", 0.6), ("int4x8/32", 0.6), ("levels/64", 1.5))
        ),
    ],
)
def test_codes_are_read_once_and_in_a_share_of_the_time_of_bfloat16(v5e, kind, most):
    case, plain = (make_case(QWEN3_30B, 64, 8, kind=each) for each in (kind, None))
    found, beaten = (v5e.schedule(each.function, each.arguments) for each in (case, plain))
    # Blocks are filled up to 8 rows, of which four are asked for: 1.02 of the floor.
    assert case.floor_bytes <= found.hbm_bytes < 1.05 * case.floor_bytes
    times = [max(each.cycles / 1.5e9, each.memory_seconds) for each in (found, beaten)]
    assert times[0] < most * times[1]
    assert times[1] < 1.03 * case_floor(plain, CHIPS["v5e"]).hbm_seconds


@pytest.mark.exhaustive
@pytest.mark.tpu_compile
@pytest.mark.parametrize("kind", ["int4/64", "int8", "e2m1/32", "e4m3/128", "int8/32", "levels/64", "int4x8/32"])
@pytest.mark.parametrize("chip", ["v4", "v5p", "v6e", "tpu7x"])
def test_real_sizes_compile_for_every_chip(chip, kind):
    with Compiler(chip) as compiler:
        for is_down in (False, True):
            case = make_case(QWEN3_30B, 64, 8, is_down, kind)
            schedule = compiler.schedule(case.function, case.arguments)
            assert any(operation.name.startswith("grouped_matmul") for operation in schedule.operations)
