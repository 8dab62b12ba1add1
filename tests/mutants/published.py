"""Faults of checkpoints that were quantized before: zeros, orders, signs and scales of others."""

from tests.mutants.fault import Fault

_PUBLISHED = "jaxinfer/checkpoint/published"
_TESTS = "tests/checkpoint/published"
_NUMBERS = f"{_TESTS}/test_parity.py::test_kernels_stand_for_the_numbers_of_the_file"

_UNDERSTOOD = "tests/checkpoint/published/test_understood.py"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "zeros of GPTQ's second version are plus one too",
        f"{_PUBLISHED}/gptq.py",
        'added = 0 if "gptq_v2" in formats else 1',
        "added = 1",
        _NUMBERS,
    ),
    Fault(
        "outputs of AWQ are in the order of their places",
        f"{_PUBLISHED}/awq.py",
        "[0, 4, 1, 5, 2, 6, 3, 7]",
        "[0, 2, 4, 6, 1, 3, 5, 7]",
        _NUMBERS,
    ),
    Fault(
        "inputs are put in the order that their codes have",
        "jaxinfer/ops/few_bits/quantized_array.py",
        "numpy.argsort(self.order, axis=-1)",
        "numpy.argsort(numpy.argsort(self.order, axis=-1), axis=-1)",
        "tests/ops/test_few_bits.py::test_products_take_inputs_in_the_order_of_each_kernel",
    ),
    Fault(
        "products take inputs in the file's order",
        "jaxinfer/ops/matmul.py",
        "inputs[..., kernels[0].order[0]]",
        "inputs[...]",
        "tests/ops/test_few_bits.py::test_products_take_inputs_in_the_order_of_each_kernel",
    ),
    Fault(
        "zeros are added",
        "jaxinfer/ops/cpu_kernels/few_bits/tiles.py",
        """code.value(f"fneg {kind} {minima}")""",
        """code.value(f"fadd {kind} {minima}, zeroinitializer")""",
        "tests/ops/test_few_bits.py::test_rows_times_codes_of_any_shape",
    ),
    Fault(
        "the first weight of a byte is its low half",
        f"{_PUBLISHED}/bitsandbytes.py",
        "high_first=True",
        "high_first=False",
        _NUMBERS,
    ),
    Fault(
        "the minima of torchao's halves of bytes are left out",
        f"{_PUBLISHED}/coded_matrix.py",
        "weights += self.minima",
        "weights += 0 * self.minima",
        _NUMBERS,
    ),
    Fault(
        "a key that nobody knows is passed over",
        f"{_PUBLISHED}/gptq.py",
        'keys.finish(Scheme(f"gptq, {bits}", layers))',
        'Scheme(f"gptq, {bits}", layers)',
        f"{_TESTS}/test_refused.py::test_what_a_configuration_asks_for_is_known_or_refused",
    ),
    Fault(
        "a group below zero is that many from the end",
        f"{_PUBLISHED}/gptq.py",
        "groups.min() < 0 or groups.max()",
        "groups.max()",
        f"{_TESTS}/test_refused.py::test_damage_is_named",
    ),
    Fault(
        "every expert that was quantized before is the first",
        "jaxinfer/checkpoint/few_bits_experts.py",
        "read(leaf.sources[layer][expert])",
        "read(leaf.sources[layer][0])",
        f"{_TESTS}/test_mixtures.py::test_a_router_in_few_bits_is_widened_and_orders_are_the_experts_own",
    ),
    Fault(
        "experts that were quantized before are all held apart before they are a stack",
        "jaxinfer/checkpoint/matrix_readers.py",
        "if leaf.is_matrix_each and forms[0] is not None:",
        "if not leaf.stacked and leaf.is_matrix_each and forms[0] is not None:",
        f"{_TESTS}/test_mixtures.py::test_memory_holds_a_stack_and_a_few_matrices",
    ),
    Fault(
        "of GPTQ's patterns the last counts",
        f"{_PUBLISHED}/gptq.py",
        "in others.items():",
        "in reversed(others.items()):",
        f"{_TESTS}/test_mixtures.py::test_modules_may_have_other_bits_or_none",
    ),
    Fault(
        "the rows of a byte of BitNet's weights are in the other order",
        "jaxinfer/checkpoint/published/bitnet.py",
        "for place in (0, 2, 4, 6)",
        "for place in (6, 4, 2, 0)",
        "tests/checkpoint/published/test_parity.py::test_kernels_stand_for_the_numbers_of_the_file",
    ),
    Fault(
        "a class of layers goes before what names a module",
        "jaxinfer/checkpoint/published/compressed_tensors.py",
        "key=lambda target: _rank(module, target)",
        "key=lambda target: -_rank(module, target)",
        f"{_UNDERSTOOD}::test_other_words_mean_the_same_numbers",
    ),
    Fault(
        "zero points of weights that are said to have none are not looked at",
        "jaxinfer/checkpoint/published/compressed_tensors.py",
        "if weights.is_symmetric and zeros in stored.shapes:",
        "if False:",
        "tests/checkpoint/published/test_refused.py::test_damage_is_named",
    ),
    Fault(
        "a module of BitNet is converted though the one around it is not",
        "jaxinfer/checkpoint/published/bitnet.py",
        "return module.endswith(key) or re.match",
        "return module.endswith(key) or False and re.match",
        f"{_UNDERSTOOD}::test_modules_of_bitnet_that_are_not_converted_stay_plain",
    ),
)
