"""Faults of tables in few bits: their groups, and what is taken out of them where they lie by columns."""

from tests.mutants.fault import Fault

_CHECKPOINTS = "tests/checkpoint/test_few_bits.py"
_ON_MESHES = "tests/parallel/on_devices/test_few_bits.py"
_KERNEL = "tests/pallas_kernels/test_take_columns.py"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "tables have one scale a row beside kernels in groups of bytes",
        "jaxinfer/ops/few_bits/formats.py",
        "return self if self.bits == INT8.bits and self.group is not None and not self.levels else INT8",
        "return INT8",
        f"{_CHECKPOINTS}::test_eight_bits_in_groups_are_nearer_than_those_of_rows",
    ),
    Fault(
        "tables are floats of 8 bits beside such kernels",
        "jaxinfer/ops/few_bits/formats.py",
        "self.group is not None and not self.levels else INT8",
        "self.group is not None else INT8",
        f"{_CHECKPOINTS}::test_eight_bits_in_groups_are_nearer_than_those_of_rows",
    ),
    Fault(
        "the methods round tables by rows",
        "jaxinfer/model_quantization.py",
        "None if form.kept is not None else form.of_tables)",
        "None if form.kept is not None else type(form)(8, None))",
        "tests/quantization/test_model.py::test_tables_are_in_the_groups_of_kernels_in_bytes",
    ),
    Fault(
        "a model at hand has tables that are rounded by rows",
        "jaxinfer/models/few_bits.py",
        "chosen = form.of_tables if is_table(path) else form",
        "chosen = type(form)(8, None) if is_table(path) else form",
        f"{_ON_MESHES}::test_a_model_that_lies_as_a_tpu_reads_it_goes_onto_a_mesh",
    ),
    Fault(
        "tables that lie by columns are not padded for a mesh",
        "jaxinfer/parallel/partitioner.py",
        "isinstance(array, ColumnArray) and is_padded",
        "isinstance(array, ColumnArray)",
        f"{_ON_MESHES}::test_a_model_that_lies_as_a_tpu_reads_it_goes_onto_a_mesh",
    ),
    Fault(
        "training rounds tables by rows",
        "train/qat/rounding.py",
        "            chosen = form.of_tables\n        elif",
        "            chosen = type(form)(8, None)\n        elif",
        "tests/train/qat/test_qat.py::test_rounding_in_a_forward_pass_is_that_of_few_bits_and_gradients_pass_it",
    ),
    Fault(
        "logits of weights that lie by columns are rounded to bfloat16",
        "jaxinfer/ops/matmul.py",
        'replace(backend, compute_dtype="float32")',
        "backend",
        "tests/ops/test_columns.py::test_logits_are_as_wide_as_their_sums",
    ),
    Fault(
        "a prompt's tokens are taken out of a table one by one",
        "jaxinfer/ops/embedding.py",
        "reference_columns if columns_T.size * LANES >= count else run",
        "run",
        "tests/ops/test_columns.py::test_tokens_read_a_table_that_lies_by_columns",
    ),
    Fault(
        "a device adds its first or last row to tokens of another's part of a table",
        "jaxinfer/ops/embedding.py",
        "jnp.where((own_T == columns_T)[:, None], rows_TD, 0)",
        "rows_TD",
        f"{_ON_MESHES}::test_each_device_reads_its_own_tokens_of_a_table_by_columns",
    ),
    Fault(
        "of scales that are taken out of a table the upper bytes are lost",
        "pallas_kernels/take_columns/kernel.py",
        "for byte in range(itemsize):",
        "for byte in range(1):",
        f"{_KERNEL}::test_columns_come_as_rows_in_their_own_bits",
    ),
    Fault(
        "all columns of a tile are added to the one that is taken out of a table",
        "pallas_kernels/take_columns/kernel.py",
        "    bits_KL = jnp.where(is_taken_KL, bits_KL, 0)\n",
        "",
        f"{_KERNEL}::test_columns_come_as_rows_in_their_own_bits",
    ),
)
