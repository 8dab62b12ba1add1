"""Faults of chunked attention, of further families' routers and norms, and of what adapters change elsewhere."""

from tests.mutants.fault import Fault

_MASKS, _ROUTING, _BLOCK = "jaxinfer/ops/masks.py", "jaxinfer/models/routing.py", "jaxinfer/models/block.py"
_OTHERS, _NAMES = "jaxinfer/checkpoint/adapters/other_tensors.py", "jaxinfer/models/families/keys/expert_names.py"
_CHUNKS = "tests/models/test_chunks.py::test_chunks_are_kept_in_rings_and_seen_by_the_definition"
_KERNELS = "tests/pallas_kernels/test_chunks.py"
_ROUTED, _MERGED = "tests/models/test_routing.py", "tests/checkpoint/adapters/test_other_tensors.py"
_LLAMA4 = "tests/models/families/test_published_llama4.py"
_MIXTURES = "tests/models/families/test_published_mixtures.py"

_RELATIVES = "tests/models/families/test_published_gpt_relatives.py"
_INSIDE = "tests/models/test_inner_parts.py::test_logits_are_the_definitions_and_each_feature_moves_them"
_IMAGES = "tests/models/families/test_published_beside_images.py"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a chunk slides",
        "pallas_kernels/window.py",
        "    if isinstance(window, Chunk):\n        return position - lax",
        "    if isinstance(window, Chunk):\n        return position - window.size + 1\n        return position - lax",
        f"{_KERNELS}::test_a_chunk_begins_at_every_multiple_of_its_size",
    ),
    Fault(
        "a tree's chunks begin where the tree does",
        "pallas_kernels/ancestors.py",
        "start_B[:, None] + depth_BT if isinstance(window, Chunk) else depth_BT",
        "depth_BT",
        f"{_KERNELS}::test_kernels_attend_within_a_chunk",
    ),
    Fault(
        "blocks that do not know their place take chunks",
        "pallas_kernels/flash_prefill/op.py",
        "    if isinstance(window, Chunk):\n        raise",
        "    if isinstance(window, Chunk) and distance:\n        raise",
        f"{_KERNELS}::test_blocks_that_do_not_know_their_place_take_no_chunks",
    ),
    Fault(
        "a part of a ring of devices does not know where it begins",
        "jaxinfer/ops/ring_attention.py",
        "query_1T = first + distance + jnp.arange",
        "query_1T = distance + jnp.arange",
        "tests/ops/test_split_sequences.py::test_a_prompt_around_a_ring_is_attended_to_and_written_in_its_order",
    ),
    Fault(
        "layers with chunks slide",
        "jaxinfer/models/decoder.py",
        "return Chunk(kind.window) if kind.chunked and kind.window is not None else kind.window",
        "return kind.window",
        _CHUNKS,
    ),
    Fault(
        "queries grow a token late",
        "jaxinfer/models/positions.py",
        "(positions_BT + sharpening.ahead) //",
        "(positions_BT + sharpening.ahead - 1) //",
        _CHUNKS,
    ),
    Fault(
        "layers that do not rotate have norms too",
        _BLOCK,
        'config.qk_norm is not None and (config.qk_norm != "rotated_heads" or rotation is not None)',
        "config.qk_norm is not None",
        _CHUNKS,
    ),
    Fault(
        "weights multiply what experts return, not what they get",
        "jaxinfer/models/experts.py",
        "(_to_scaled if experts.scales_inputs else _to_alike)",
        "_to_alike",
        _CHUNKS,
    ),
    Fault(
        "heads are normed before their rotation",
        _BLOCK,
        "            if rotation is not None and config.norm_after_rotation:\n                heads",
        "            if config.norm_after_rotation and has_norms is None:\n                heads",
        "tests/models/test_chunks.py::test_heads_are_normed_after_their_rotation",
    ),
    Fault(
        "a text without end has queries that grow",
        "jaxinfer/models/streaming.py",
        "if kind.sharpening is not None:",
        "if kind.sharpening is not None and kind.rope is not None:",
        "tests/models/test_chunks.py::test_a_text_without_end_is_refused",
    ),
    Fault(
        "sigmoids choose where logits do",
        _ROUTING,
        'return jax.nn.sigmoid(logits) if experts.scoring == "sigmoid" else logits',
        'return jax.nn.sigmoid(logits) if "sigmoid" in experts.scoring else logits',
        f"{_ROUTED}::test_sigmoids_of_the_chosen_leave_the_choice_to_the_logits",
    ),
    Fault(
        "a sparse mixer weighs among all that are left",
        _ROUTING,
        "jnp.where(left_BTE & is_near_BTE, logits_BTE, -jnp.inf)",
        "jnp.where(left_BTE, logits_BTE, -jnp.inf)",
        f"{_ROUTED}::test_a_sparse_mixer_weighs_each_choice_among_those_near_it",
    ),
    Fault(
        "a sparse mixer weighs the second beside the first",
        _ROUTING,
        "        left_BTE &= jnp.arange(experts.num_experts) != here_BT1\n",
        "",
        f"{_ROUTED}::test_a_sparse_mixer_weighs_each_choice_among_those_near_it",
    ),
    Fault(
        "up has the columns of gate",
        _NAMES,
        '"mlp.experts.up": replace(wide, first=width)',
        '"mlp.experts.up": wide',
        f"{_LLAMA4}::test_experts_stand_side_by_side_in_the_columns_of_a_tensor",
    ),
    Fault(
        "a base is stretched by alpha itself",
        "jaxinfer/models/families/hunyuan.py",
        "theta * alpha ** (head_dim / (head_dim - 2))",
        "theta * alpha",
        f"{_MIXTURES}::test_layers_are_those_of_the_published_models",
    ),
    Fault(
        "two magnitudes of long rope are one",
        "jaxinfer/models/families/phimoe.py",
        "            if short != long:\n",
        "            if short is long is None:\n",
        f"{_MIXTURES}::test_what_the_decoder_does_not_do_is_refused_by_name",
    ),
    Fault(
        "rows of tokens are stored in order",
        _OTHERS,
        "tensor[list(self.rows[0])] = self.rows[1]",
        "tensor[sorted(self.rows[0])] = self.rows[1]",
        f"{_MERGED}::test_tensors_are_replaced_by_name_by_row_and_added_to",
    ),
    Fault(
        "what is added to an embedding is not scaled",
        _OTHERS,
        "down_RV.T * np.float32(settings.scale_of(module))",
        "down_RV.T * np.float32(1)",
        f"{_MERGED}::test_an_embedding_has_its_matrices_the_other_way_round",
    ),
    Fault(
        "a tensor that nothing asks for is merged",
        _OTHERS,
        'elif not is_saved(name, settings) and not is_saved(name, settings, ("embed_tokens", "lm_head")):',
        'elif not name.endswith("weight"):',
        f"{_MERGED}::test_what_does_not_fit_is_refused_by_one_line",
    ),
    Fault(
        "Mixtral's rotary base is Llama's where its file has none",
        "jaxinfer/models/families/mixtral.py",
        "theta=1e6",
        "theta=1e4",
        "tests/models/families/test_published_experts.py::test_the_base_of_rotary_positions_may_be_left_unsaid",
    ),
    Fault(
        "a growing query's factor is rounded once with its product",
        "jaxinfer/models/positions.py",
        "1 + rounded(sharpening.strength * jnp.log1p(count_BT))",
        "1 + sharpening.strength * jnp.log1p(count_BT)",
        "tests/ops/test_rounding.py::test_growing_queries_have_the_same_bits_with_all_that_goes_around",
    ),
    Fault(
        "xIELU has one curvature",
        "jaxinfer/models/xielu.py",
        "rounded(above * wide * wide)",
        "rounded(below * wide * wide)",
        "tests/models/test_xielu.py::test_xielu_is_as_defined_and_its_bits_do_not_depend_on_a_sum_before_it",
    ),
    Fault(
        "Nemotron's norms are stored as they are",
        "jaxinfer/models/config.py",
        'NORMS_PLUS_ONE = ("rms_plus_one", "layer_plus_one")',
        'NORMS_PLUS_ONE = ("rms_plus_one",)',
        "tests/models/test_norm.py::test_norms_are_as_defined",
    ),
    Fault(
        "only the first head of a group has neighbouring lanes",
        "jaxinfer/models/families/family.py",
        "lanes = np.arange(together).reshape(-1, head_dim or together)",
        "lanes = np.arange(together).reshape(1, together)",
        f"{_RELATIVES}::test_rows_of_groups_of_heads_are_found_and_their_neighbouring_lanes_taken_apart",
    ),
    Fault(
        "Falcon's keys stand first in a group",
        "jaxinfer/models/families/keys/fused_names.py",
        '"query": (0, queries), "key": (queries, width)',
        '"query": (width, queries), "key": (0, width)',
        f"{_RELATIVES}::test_falcons_groups_have_their_queries_before_a_key_and_a_value",
    ),
    Fault(
        "Falcon's scores fall with the distance where heads share keys",
        "jaxinfer/models/families/falcon.py",
        "if has_alibi and (is_new or has_one_head):",
        "if has_alibi and is_new:",
        f"{_RELATIVES}::test_what_the_decoder_does_not_do_is_refused_by_name",
    ),
    Fault(
        "Apertus is not stretched where its file does not say how",
        "jaxinfer/models/families/apertus.py",
        "ConfigReader(with_rope_section(config, _STRETCHED)",
        "ConfigReader(config",
        f"{_RELATIVES}::test_apertus_stretches_positions_where_its_file_does_not_say_how",
    ),
    Fault(
        "a head's name stays where the others' move",
        "jaxinfer/models/families/family.py",
        "if self.other_head else {}",
        "if not self.other_head else {}",
        f"{_IMAGES}::test_both_spellings_of_names_are_known",
    ),
    Fault(
        "nobody hears of a vision model that is left out",
        "jaxinfer/models/families/family.py",
        "return self.notice if any(map(is_ignored, tensors)) else None",
        "return self.notice if all(map(is_ignored, tensors)) else None",
        f"{_IMAGES}::test_a_notice_names_what_is_left_out_where_it_is_there",
    ),
    Fault(
        "MPT's scores may be multiplied by zero",
        "jaxinfer/models/families/mpt.py",
        "if scale == 0:",
        "if scale == -1:",
        "tests/models/families/test_published_gpt_relatives.py::test_what_the_decoder_does_not_do_is_refused_by_name",
    ),
    Fault(
        "llama3 scaling that is a step scales short waves",
        "jaxinfer/models/rope_frequencies.py",
        "return np.where(wavelengths <= longest, plain, ",
        "return np.where(wavelengths >= longest, plain, ",
        "tests/models/families/test_rope.py::"
        "test_llama3_frequencies_are_those_of_transformers_also_where_they_are_a_step",
    ),
    Fault(
        "a gate multiplies as it is",
        _BLOCK,
        "mixed_BTNH * jax.nn.sigmoid(gate_BTNH)",
        "mixed_BTNH * gate_BTNH",
        _INSIDE,
    ),
    Fault(
        "values have no bound",
        _BLOCK,
        "        values_BTKH = bounded(values_BTKH)\n",
        "",
        _INSIDE,
    ),
    Fault(
        "sinusoids begin at the first position",
        "jaxinfer/models/network.py",
        "sinusoids(positions_BT + config.sinusoids,",
        "sinusoids(positions_BT,",
        _INSIDE,
    ),
    Fault(
        "bounded values are divided where what reads them is multiplied",
        "jaxinfer/quantization/folding.py",
        " and config.clip_qkv is None",
        "",
        "tests/quantization/test_folding.py",
    ),
    Fault(
        "heads that turn backwards turn forwards",
        "jaxinfer/models/families/family.py",
        "        if self.backwards:\n",
        "        if self.backwards and self.heads:\n",
        "tests/models/test_inner_parts.py::test_heads_that_turn_backwards_have_their_halves_exchanged",
    ),
    Fault(
        "of forms that differ in their shapes the first one is taken",
        "jaxinfer/models/families/family.py",
        "key=lambda block: not fits(block)",
        "key=lambda block: 0",
        f"{_IMAGES}::test_experts_of_qwen3_vl_are_found_by_their_shapes",
    ),
)
