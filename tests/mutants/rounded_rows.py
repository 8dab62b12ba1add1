"""Faults of rows in bytes: signs, tails, sums that do not fit, scales of parts, tables, and SmoothQuant's factors."""

from tests.mutants.fault import Fault

_KERNELS = "jaxinfer/ops/cpu_kernels/rounded_rows"
_ROWS, _MESH = "tests/ops/test_rounded_rows.py", "tests/parallel/on_devices/test_rounded_rows.py"
_ANY_SHAPE = f"{_ROWS}::test_rows_times_codes_of_any_shape"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "what makes bytes unsigned is not taken off the sums of rows",
        f"{_KERNELS}/tiles.py",
        "to i32')}, {added}\")",
        "to i32')}, 0\")",
        f"{_ROWS}::test_processors_without_instructions_for_bytes_have_the_same_bits",
    ),
    Fault(
        "what makes four bits unsigned is not taken off the sums of groups",
        f"{_KERNELS}/byte_sums.py",
        "return form.offset or 0",
        "return 0",
        _ANY_SHAPE,
    ),
    Fault(
        "sizes of codes are multiplied by a row without their signs",
        f"{_KERNELS}/byte_sums.py",
        "(BYTES, numbers), (BYTES, codes))\n",
        "(BYTES, numbers), (BYTES, numbers))\n",
        f"{_ROWS}::test_processors_without_instructions_for_bytes_have_the_same_bits",
    ),
    Fault(
        "sixteen sums of codes of four bits are added in 16 bits",
        f"{_KERNELS}/byte_sums.py",
        "32767 // (2 * 15 * 127)",
        "2 * 32767 // (2 * 15 * 127)",
        f"{_ROWS}::test_processors_without_instructions_for_bytes_have_the_same_bits",
    ),
    Fault(
        "half a vector at the end of a row is left out",
        f"{_KERNELS}/tiles.py",
        'icmp eq i64 {left}, 0"), "done", "rest")',
        'icmp sge i64 {left}, 0"), "done", "rest")',
        _ANY_SHAPE,
    ),
    Fault(
        "sixteen outputs have the scales of sixteen groups of the first",
        f"{_KERNELS}/product_code.py",
        'call_tile(code, "@turn", (lines, to), (padded,))',
        'call_tile(code, "@prepare", (place, place, to), (some, groups, padded, ahead))',
        _ANY_SHAPE,
    ),
    Fault(
        "outputs that are less than sixteen read what lies behind them",
        "jaxinfer/ops/cpu_kernels/sixteen_outputs.py",
        'select i1 {is_whole}, ptr {w}, ptr {copies}")',
        'select i1 {is_whole}, ptr {w}, ptr {w}")',
        f"{_ROWS}::test_nothing_beside_the_arrays_is_read",
    ),
    Fault(
        "outputs that are less than sixteen are all written",
        "jaxinfer/ops/cpu_kernels/sixteen_outputs.py",
        'mask = vectors.first(code, LANES, "%count")',
        'mask = vectors.first(code, LANES, "16")',
        _ANY_SHAPE,
    ),
    Fault(
        "pairs of products are added in 16 bits where no instruction multiplies bytes",
        f"{_KERNELS}/byte_sums.py",
        'upper = code.value(f"ashr {pairs} {products}, {sixteen}")',
        "upper = code.value(f\"ashr {pairs} {products}, <{', '.join(['i32 17'] * (VECTOR // 2))}>\")",
        f"{_ROWS}::test_processors_without_instructions_for_bytes_have_the_same_bits",
    ),
    Fault(
        "the last half of a row of codes is read as a whole vector",
        f"{_KERNELS}/tiles.py",
        'code.load(_HALF_BYTES if is_half else BYTES, code.at("i8", start, place), 1)\n        if is_half:',
        'code.load(BYTES, code.at("i8", start, place), 1)\n        if False:',
        f"{_ROWS}::test_nothing_beside_the_arrays_is_read",
    ),
    Fault(
        "rows are rounded towards zero",
        f"{_KERNELS}/rounding_code.py",
        'part = code.value(f"call {FLOATS} @llvm.rint.v{LANES}f32({FLOATS} {part})")',
        "part = part",
        f"{_ROWS}::test_rows_are_rounded_to_the_nearest_by_their_largest_number",
    ),
    Fault(
        "the largest number of a row is the largest above zero",
        "jaxinfer/ops/few_bits/rounded_rows.py",
        "jnp.max(jnp.abs(rows_MK.astype(jnp.float32)), axis=-1",
        "jnp.max(rows_MK.astype(jnp.float32), axis=-1",
        f"{_ROWS}::test_rows_are_rounded_to_the_nearest_by_their_largest_number",
    ),
    Fault(
        "XLA adds groups without their minima",
        "jaxinfer/ops/rounded_products.py",
        "if array.minima is not None:",
        "if False:",
        f"{_ROWS}::test_xla_multiplies_the_same_where_there_are_no_kernels",
    ),
    Fault(
        "each device rounds its part of a row by its own largest number",
        "jaxinfer/ops/rounded_products.py",
        "most_M1 if in_axis is None else lax.pmax(most_M1, in_axis)",
        "most_M1",
        f"{_MESH}::test_a_part_of_a_row_is_rounded_by_the_largest_number_of_all_of_it",
    ),
    Fault(
        "the output matrix multiplies rows in bytes too",
        "jaxinfer/models/network.py",
        "replace(self.backend, activations=None)",
        "self.backend",
        "tests/decoding/test_few_bits.py::test_the_output_matrix_multiplies_rows_as_they_are",
    ),
    Fault(
        "rows in bytes run with weights that they do not multiply",
        "jaxinfer/model_params.py",
        "if activations is not None:\n        change_matrices",
        "if False:\n        change_matrices",
        "tests/checkpoint/test_activations.py::test_other_weights_are_refused_in_one_line",
    ),
    Fault(
        "weights are kept once more for rows in bytes",
        "jaxinfer/model_params.py",
        "step_rows=1, activations=None",
        "step_rows=1",
        "tests/checkpoint/test_activations.py::test_kept_weights_are_the_same_however_rows_are_multiplied",
    ),
    Fault(
        "SmoothQuant leaves the weights' sizes out",
        "jaxinfer/quantization/smoothing.py",
        "/ weights_K ** (1 - STRENGTH)",
        "/ weights_K**0",
        "tests/quantization/test_smoothing.py::test_factors_share_what_is_hard_to_round_between_inputs_and_weights",
    ),
)
