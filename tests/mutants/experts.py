"""Faults of experts: their choice, their products, their tensors, their devices, and what is counted of them."""

from tests.mutants.fault import Fault

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a router's exponential begins with a product of the difference",
        "jaxinfer/models/routing.py",
        "rounded(jnp.exp(rounded(logits - jnp.max(logits, axis=-1, keepdims=True))))",
        "rounded(jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True)))",
        "tests/models/test_routing.py::test_a_tokens_choice_has_the_same_bits_in_any_company",
    ),
    Fault(
        "the scores of the chosen are those that chose them",
        "jaxinfer/models/routing.py",
        "weights_BTC = jnp.take_along_axis(scores_BTE,",
        "weights_BTC = jnp.take_along_axis(choice_BTE,",
        "tests/models/test_routing.py::test_groups_are_kept_by_their_best_or_by_the_sum_of_their_two_best",
    ),
    Fault(
        "experts of groups that are not kept may be chosen",
        "jaxinfer/models/routing.py",
        "jnp.where(is_kept[..., None], grouped, -jnp.inf)",
        "jnp.where(is_kept[..., None], grouped, grouped)",
        "tests/models/test_routing.py::test_groups_are_kept_by_their_best_or_by_the_sum_of_their_two_best",
    ),
    Fault(
        "a softmax counts some experts twice",
        "jaxinfer/models/routing.py",
        "        values = lower + jnp.pad(",
        "        values = 2 * lower + jnp.pad(",
        "tests/models/test_routing.py::test_weights_are_a_softmax_over_all_or_over_the_chosen",
    ),
    Fault(
        "an expert's last block is not run",
        "jaxinfer/ops/experts.py",
        "ends_E = jnp.cumsum((counts_E + rows - 1) // rows,",
        "ends_E = jnp.cumsum((counts_E + rows // 2) // rows,",
        "tests/ops/test_experts.py::test_every_token_gets_its_experts_however_many_share_them",
    ),
    Fault(
        "all blocks are run, and so are experts that no token goes to",
        "jaxinfer/ops/experts.py",
        "    return Blocks(jnp.minimum(experts, num_experts - 1).astype(jnp.int32), ends_E[-1], tokens, places_NC)",
        "    return Blocks(jnp.minimum(experts, num_experts - 1).astype(jnp.int32), most, tokens, places_NC)",
        "tests/ops/test_experts.py::test_blocks_that_are_run_are_of_experts_that_tokens_go_to_and_hold_every_copy",
    ),
    Fault(
        "a token's experts are multiplied by nothing",
        "jaxinfer/ops/experts.py",
        "rounded(results_NCD * weights_NC[..., None].astype(results_NCD.dtype))",
        "rounded(results_NCD * jnp.ones_like(weights_NC)[..., None].astype(results_NCD.dtype))",
        "tests/ops/test_experts.py::test_every_token_gets_its_experts_however_many_share_them",
    ),
    Fault(
        "the derivative forgets the weights",
        "jaxinfer/ops/experts.py",
        "jnp.where(chosen_NC == index, weights_NC, 0)",
        "jnp.where(chosen_NC == index, 1.0, 0)",
        "tests/ops/test_experts.py::test_derivatives_are_those_of_the_definition",
    ),
    Fault(
        "layers that differ in their experts are scanned as one",
        "jaxinfer/models/layers.py",
        "for _, stretch in itertools.groupby(config.bodies):",
        "for _, stretch in itertools.groupby(config.layers):",
        "tests/models/families/test_published_experts.py::"
        "test_layers_that_differ_in_their_experts_alone_share_a_cache_and_not_a_scan",
    ),
    Fault(
        "layers are sparse from the first on",
        "jaxinfer/models/families/keys/expert_keys.py",
        "(layer + 1) % step == 0 and layer not in dense",
        "layer % step == 0 and layer not in dense",
        "tests/models/families/test_published_experts.py::"
        "test_layers_that_differ_in_their_experts_alone_share_a_cache_and_not_a_scan",
    ),
    Fault(
        "a token may have more experts than there are",
        "jaxinfer/models/families/keys/expert_keys.py",
        "    if chosen > count:",
        "    if chosen > 10 * count:",
        "tests/models/families/test_published_experts.py::test_what_the_decoder_does_not_do_is_refused_by_name",
    ),
    Fault(
        "the rows of up are those of gate",
        "jaxinfer/models/families/keys/expert_names.py",
        'Part(f"{_LAYER}{gate_up}", width, heads',
        'Part(f"{_LAYER}{gate_up}", 0, heads',
        "tests/checkpoint/test_experts.py::test_experts_load_from_every_form_that_is_published",
    ),
    Fault(
        "the tensors of all experts are not looked for",
        "jaxinfer/models/families/family.py",
        "        for block in names.others:",
        "        for block in names.others[:1]:",
        "tests/checkpoint/test_experts.py::test_experts_load_from_every_form_that_is_published",
    ),
    Fault(
        "every expert of Mixtral's file is dense",
        "jaxinfer/checkpoint/gguf/architectures/llama.py",
        'if reader.optional_int("expert_count") is not None:',
        'if reader.optional_int("expert_count") is None and not biased:',
        "tests/checkpoint/gguf/test_experts.py::test_parameters_and_configuration_are_those_of_the_folder",
    ),
    Fault(
        "every device takes the first experts' tokens",
        "jaxinfer/ops/experts.py",
        "lax.axis_index(expert_axis) * kernels[0].shape[0]",
        "lax.axis_index(expert_axis) * 0",
        "tests/parallel/on_devices/test_experts.py::test_logits_are_those_of_one_device",
    ),
    Fault(
        "experts split over devices that do not divide them",
        "jaxinfer/parallel/partitioner.py",
        "    if count % devices:",
        "    if count < devices:",
        "tests/planning/test_experts.py::test_experts_that_do_not_split_are_refused",
    ),
    Fault(
        "a plan's step reads all experts",
        "jaxinfer/planning/footprint.py",
        "round(self.expert_bytes * (1 - self.experts.share_read(num_tokens)))",
        "round(self.expert_bytes * 0)",
        "tests/planning/test_experts.py::test_a_step_reads_the_experts_that_its_tokens_go_to_and_multiplies_two",
    ),
)
