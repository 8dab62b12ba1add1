"""Faults of what gpt-oss is the first to have: attention sinks, experts with biases and limits, and its files."""

from tests.mutants.fault import Fault

_ATTENTION, _EXPERTS = "jaxinfer/ops/attention.py", "jaxinfer/ops/experts.py"
_LAWS = "tests/cache/test_laws.py::test_trees_see_what_was_kept_and_their_own_ancestors"
_BY_CPU, _BY_XLA = "tests/ops/test_cpu_attention.py", "tests/ops/test_split_sequences.py"
_PARITY = "tests/models/test_parity.py::test_logits_equal_those_of_transformers[gpt_oss]"
_MXFP4 = "tests/checkpoint/published/test_mxfp4.py"
_STAND_FOR = f"{_MXFP4}::test_blocks_stand_for_what_transformers_makes_of_them_and_are_converted_without_loss"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a sink above all scores is counted as if it were below",
        _ATTENTION,
        "    factor = jnp.exp(largest - highest)",
        "    factor = jnp.ones_like(largest)",
        f"{_BY_XLA}::test_parts_of_the_slots_join_to_attention_to_all",
    ),
    Fault(
        "every device adds the sinks",
        "jaxinfer/ops/split_slots.py",
        "    joined = partial.scaled_to(largest_BTN)",
        "    joined = partial.with_sinks(sink_logits_N).scaled_to(largest_BTN)",
        f"{_BY_XLA}::test_parts_of_the_slots_join_to_attention_to_all",
    ),
    Fault(
        "a ring's back part has no sinks",
        "jaxinfer/ops/ring_attention.py",
        "for part in (found.front, found.back))",
        "for part in (found.front, found.back._replace(totals_BTN=found.back.totals_BTN / 2)))",
        f"{_BY_XLA}::test_a_prompt_around_a_ring_is_attended_to_and_written_in_its_order",
    ),
    Fault(
        "the sum of a row's weights begins with none",
        "jaxinfer/ops/cpu_kernels/attention_code.py",
        'start = vectors.spread(code, code.load_at("float", "%starts", row.index))',
        "start = vectors.constant(0.0)",
        f"{_BY_CPU}::test_attention_of_any_shape",
    ),
    Fault(
        "all heads of a group have the sink of its first",
        "jaxinfer/ops/cpu_kernels/attention_code.py",
        'head = code.arithmetic("add", head, code.arithmetic("sdiv", row, tokens))',
        'head = code.arithmetic("add", head, 0)',
        f"{_BY_CPU}::test_attention_of_any_shape",
    ),
    Fault(
        "pages are attended to without sinks",
        "jaxinfer/cache/paged.py",
        '{**scores.rule, "window": self.window,',
        '{"softcap": scores.softcap, "window": self.window,',
        _LAWS,
    ),
    Fault(
        "rings are attended to without sinks",
        "jaxinfer/cache/ring.py",
        '{**scores.rule, "num_kv_heads"',
        '{"softcap": scores.softcap, "num_kv_heads"',
        _LAWS,
    ),
    Fault(
        "a kernel's sums begin with sinks of no weight",
        "pallas_kernels/block_attention.py",
        "SINK_TOTAL = 1 / LANES",
        "SINK_TOTAL = 0.0",
        "tests/pallas_kernels/test_tree_verify.py::test_agrees_with_the_reference",
    ),
    Fault(
        "tokens of a head have sinks of others",
        "pallas_kernels/block_attention.py",
        "jnp.tile(sinks_CWB, (1, 1, tokens))",
        "jnp.tile(sinks_CWB, (1, tokens, 1))",
        "tests/pallas_kernels/test_tree_verify.py::test_agrees_with_the_reference",
    ),
    Fault(
        "sinks are learned the wrong way",
        "pallas_kernels/flash_prefill/op.py",
        "of_sinks_N = -math.log(2) * jnp.sum(",
        "of_sinks_N = math.log(2) * jnp.sum(",
        "tests/pallas_kernels/test_flash_prefill.py::test_gradients_are_those_of_the_reference",
    ),
    Fault(
        "the model has no sinks",
        "jaxinfer/models/block.py",
        "config.attention_softcap, self._sink_logits())",
        "config.attention_softcap, None and self._sink_logits())",
        _PARITY,
    ),
    Fault(
        "gates are bounded on both sides",
        _EXPERTS,
        "activate(jnp.minimum(gate, limit))",
        "activate(jnp.clip(gate, -limit, limit))",
        _PARITY,
    ),
    Fault(
        "nothing is added to what gates multiply",
        _EXPERTS,
        "(jnp.clip(up, -limit, limit) + 1)",
        "jnp.clip(up, -limit, limit)",
        "tests/ops/test_experts.py::test_every_token_gets_its_experts_however_many_share_them",
    ),
    Fault(
        "every expert has the first one's bias",
        _EXPERTS,
        "own = lax.dynamic_index_in_dim(biases[which], expert, keepdims=False)",
        "own = lax.dynamic_index_in_dim(biases[which], 0 * expert, keepdims=False)",
        "tests/ops/test_experts.py::test_every_token_gets_its_experts_however_many_share_them",
    ),
    Fault(
        "the router has no bias",
        "jaxinfer/models/experts.py",
        "            logits_BTE = logits_BTE + jnp.broadcast_to(bias_E, logits_BTE.shape)",
        "            logits_BTE = logits_BTE + jnp.broadcast_to(0 * bias_E, logits_BTE.shape)",
        _PARITY,
    ),
    Fault(
        "gate and up do not take turns",
        "jaxinfer/models/families/family.py",
        "part = tensor[..., self.first : self.first + count * self.every : self.every]",
        "part = np.split(tensor, self.every, axis=-1)[self.first % self.every]",
        _PARITY,
    ),
    Fault(
        "the higher half of a byte comes first",
        "jaxinfer/checkpoint/published/mxfp4.py",
        "in_halves(blocks.reshape(len(blocks), -1))",
        "in_halves(blocks.reshape(len(blocks), -1), high_first=True)",
        _STAND_FOR,
    ),
    Fault(
        "gate has the rows of up",
        "jaxinfer/checkpoint/published/mxfp4.py",
        '(("gate_proj", 0, 2), ("up_proj", 1, 2))',
        '(("gate_proj", 1, 2), ("up_proj", 0, 2))',
        _STAND_FOR,
    ),
    Fault(
        "a scale that is no number is multiplied",
        "jaxinfer/checkpoint/published/mxfp4.py",
        "if exponents.max(initial=0) > MOST_EXPONENT:",
        "if exponents.max(initial=0) > 255:",
        f"{_MXFP4}::test_damaged_files_are_refused_by_name",
    ),
)
