"""Faults of experts in few bits, of floats of 4 bits, and of the GGUF files that have both."""

from tests.mutants.fault import Fault

_TILES = "jaxinfer/ops/cpu_kernels/few_bits/tiles.py"
_PRODUCTS, _EXPERTS = "tests/ops/test_few_bits.py", "tests/ops/test_few_bits_experts.py"
_LOADED, _GGUF = "tests/checkpoint/test_few_bits_experts.py", "tests/checkpoint/gguf/test_experts.py"
_CHOSEN = "tests/quantization/test_experts.py"
_PARAMETERS = f"{_GGUF}::test_parameters_and_configuration_are_those_of_the_folder"
_ROUNDED = f"{_LOADED}::test_every_expert_is_rounded_as_it_would_be_alone_saved_and_loaded"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "every expert has the codes of the first",
        "jaxinfer/ops/cpu_kernels/few_bits/product_code.py",
        "    at = place\n",
        '    at = code.arithmetic("mul", place, 0)\n',
        f"{_EXPERTS}::test_every_token_gets_what_the_experts_that_codes_stand_for_return",
    ),
    Fault(
        "experts' rows begin where those of one row less would",
        "jaxinfer/ops/cpu_kernels/few_bits/product_code.py",
        "matrices[1].shape(code, 2 + in_stacks)[-1]",
        "matrices[1].shape(code, 2)[-1]",
        f"{_EXPERTS}::test_every_token_gets_what_the_experts_that_codes_stand_for_return",
    ),
    Fault(
        "exponents of scales are one bit too low",
        _TILES,
        "shl {some} {wide}, {constant(23)}",
        "shl {some} {wide}, {constant(22)}",
        f"{_PRODUCTS}::test_scales_that_are_exponents_are_powers_of_two_by_numpy_by_xla_and_in_products",
    ),
    Fault(
        "half is three quarters on processors without products of pairs",
        _TILES,
        "icmp ult {whole} {sizes}, {constant(2)}",
        "icmp ult {whole} {sizes}, {constant(1)}",
        f"{_PRODUCTS}::test_another_processors_vectors_add_the_same",
    ),
    Fault(
        "weights are rounded in units of which the largest is three",
        "jaxinfer/ops/few_bits/round_to_nearest.py",
        "_LARGEST_EXPONENT = 2",
        "_LARGEST_EXPONENT = 1",
        f"{_PRODUCTS}::test_a_powers_exponent_is_that_of_the_largest_weight",
    ),
    Fault(
        "a group of no finite numbers has a scale",
        "jaxinfer/ops/few_bits/round_to_nearest.py",
        "jnp.where(exponents == _NO_NUMBER, _NO_NUMBER, powers)",
        "jnp.where(exponents == _NO_NUMBER, MOST_EXPONENT, powers)",
        f"{_PRODUCTS}::test_a_powers_exponent_is_that_of_the_largest_weight",
    ),
    Fault(
        "codes of 6 bits keep their offset as a TPU reads them",
        "jaxinfer/ops/few_bits/columns.py",
        "codes.astype(jnp.int8) - jnp.int8(_taken_off(form))",
        "codes.astype(jnp.int8)",
        "tests/ops/test_columns.py::test_experts_are_the_same_by_columns_in_every_form",
    ),
    Fault(
        "experts in blocks of fp8 go by a loop",
        "jaxinfer/ops/few_bits/columns.py",
        "is_known = form.bits < _BYTE or form.levels in ((), FP8.levels)",
        "is_known = form.bits < _BYTE or not form.levels",
        f"{_EXPERTS}::test_forms_that_no_kernel_widens_and_mixed_ones_go_by_a_loop",
    ),
    Fault(
        "an expert is written to its neighbour's place",
        "jaxinfer/checkpoint/few_bits_experts.py",
        "if leaf.stacked else (expert,)",
        "if leaf.stacked else (expert // 2,)",
        _ROUNDED,
    ),
    Fault(
        "all experts are saved as the first",
        "jaxinfer/checkpoint/loaded.py",
        "jax.tree.map(lambda part: part[place], one)",
        "jax.tree.map(lambda part: part[0], one)",
        _ROUNDED,
    ),
    Fault(
        "the damaged expert is not the one that is named",
        "jaxinfer/checkpoint/few_bits_experts.py",
        "sources[expert if leaf.is_matrix_each else 0].tensor",
        "sources[0].tensor",
        f"{_LOADED}::test_what_experts_are_not_asked_for_with_is_refused_in_one_line",
    ),
    Fault(
        "where experts alone are asked for, kernels are rounded too",
        "jaxinfer/checkpoint/few_bits.py",
        "(not self.only_experts and (is_kernel(path) or is_table(path)))",
        "(is_kernel(path) or (not self.only_experts and is_table(path)))",
        f"{_LOADED}::test_experts_alone_may_be_in_few_bits",
    ),
    Fault(
        "a plan counts all kernels where experts alone are asked for",
        "jaxinfer/planning/few_bits.py",
        "        if not weights.takes(path):\n",
        "        if weights.form is None:\n",
        "tests/planning/test_experts.py::test_experts_in_few_bits_are_counted_in_their_bits",
    ),
    Fault(
        "MXFP4 blocks of a GGUF file have their exponent for a code",
        "jaxinfer/checkpoint/gguf/block_parts.py",
        "return [blocks[:, 1:], blocks[:, :1]]",
        "return [blocks[:, :-1], blocks[:, -1:]]",
        f"{_GGUF}::test_blocks_of_experts_stay_as_they_lie",
    ),
    Fault(
        "all lanes of deepseek2's heads are content",
        "jaxinfer/checkpoint/gguf/architectures/deepseek2.py",
        '"qk_nope_head_dim": width - turning,',
        '"qk_nope_head_dim": width,',
        f"{_PARAMETERS}[deepseek_v3]",
    ),
    Fault(
        "deepseek2's scores are multiplied by a tenth of what they are to be",
        "jaxinfer/checkpoint/gguf/architectures/deepseek2.py",
        "round(10 * multiplier, 6)",
        "round(multiplier, 6)",
        f"{_PARAMETERS}[deepseek_v3]",
    ),
    Fault(
        "gpt-oss's rotary frequencies change from a whole lane on",
        "jaxinfer/checkpoint/gguf/architectures/gpt_oss.py",
        '"truncate": False}}',
        '"truncate": True}}',
        f"{_PARAMETERS}[gpt_oss]",
    ),
    Fault(
        "an expert is calibrated on the tokens of all",
        "jaxinfer/quantization/experts.py",
        "np.nonzero(self.chosen_NC == expert)",
        "np.nonzero(self.chosen_NC >= 0)",
        f"{_CHOSEN}::test_an_expert_is_shown_its_own_tokens_and_what_it_makes_of_them",
    ),
    Fault(
        "down is calibrated on what gate and up made before they were quantized",
        "jaxinfer/quantization/experts.py",
        "seen_by_down(found, biases)",
        "seen_by_down(expert, biases)",
        f"{_CHOSEN}::test_an_expert_is_shown_its_own_tokens_and_what_it_makes_of_them",
    ),
    Fault(
        "the bias of an expert's up is not scaled with it",
        "jaxinfer/quantization/experts.py",
        'biases = {**biases, "up": biases["up"] / factors_F} if biases else biases',
        "biases = dict(biases)",
        f"{_CHOSEN}::test_an_expert_is_shown_its_own_tokens_and_what_it_makes_of_them",
    ),
    Fault(
        "experts are calibrated on however few tokens",
        "jaxinfer/quantization/experts.py",
        "if count < LEAST_TOKENS:",
        "if count < 1:",
        f"{_CHOSEN}::test_an_experts_results_change_less_than_by_rounding",
    ),
    Fault(
        "a router is given tokens that were divided",
        "jaxinfer/quantization/folding.py",
        '(("mlp", "router"), ("mlp", "shared_gate"))',
        '(("mlp", "shared_gate"),)',
        f"{_CHOSEN}::test_scaled_inputs_of_experts_change_no_logits",
    ),
)
