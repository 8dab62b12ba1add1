"""Faults of meshes: rules, padding, the order of a ring, joins of split slots, and the stages of a pipeline."""

from tests.mutants.fault import Fault

_RULES, _MESH = "jaxinfer/parallel/rules.py", "jaxinfer/parallel/mesh.py"
_PARTITIONER, _PIPELINE = "jaxinfer/parallel/partitioner.py", "jaxinfer/models/pipeline.py"
_OF_RULES, _ON_DEVICES = "tests/parallel/test_rules.py", "tests/parallel/on_devices"
_TOKENS, _BITS = f"{_ON_DEVICES}/test_tokens.py", f"{_ON_DEVICES}/test_bits.py"
_FEW_BITS = f"{_ON_DEVICES}/test_few_bits.py"
_LOGITS = f"{_ON_DEVICES}/test_logits.py::test_logits_are_those_of_one_device"

_MESSAGES, _OF_MESSAGES = "jaxinfer/parallel/messages.py", "tests/parallel/test_messages.py"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "messages are kept for ever",
        _MESSAGES,
        '        self._service.key_value_delete(f"{self._name}/{block}/")\n',
        "",
        f"{_OF_MESSAGES}::test_messages_arrive_in_order_and_are_forgotten_once_all_have_them",
    ),
    Fault(
        "messages are forgotten before all have them",
        _MESSAGES,
        "        for process in self._receivers:\n",
        "        for process in ():\n",
        f"{_OF_MESSAGES}::test_whoever_is_hundreds_of_messages_behind_is_waited_for",
    ),
    Fault(
        "of a long message the first part arrives",
        _MESSAGES,
        'for number in range(1, int.from_bytes(first[:4], "big")):',
        "for number in ():",
        f"{_OF_MESSAGES}::test_a_message_of_many_bytes_arrives_whole",
    ),
    Fault(
        "parts of an array that change their length keep the old shape",
        "jaxinfer/parallel/host_parts.py",
        "parts[0].shape[axis]",
        "array.shape[axis]",
        f"{_OF_MESSAGES}::test_parts_of_an_array_change_their_length_and_come_back",
    ),
    Fault(
        "key/value heads are not split",
        "jaxinfer/ops/logical_axes.py",
        '"kv_heads": TENSOR',
        '"kv_heads": None',
        _OF_RULES,
    ),
    Fault(
        "every stage holds all layers",
        _RULES,
        'None if axis == "layers" and backend.stages == 1 else axis',
        'None if axis == "layers" else axis',
        _OF_RULES,
    ),
    Fault(
        "heads that do not divide are not refused",
        _RULES,
        '"key/value heads": config.num_kv_heads',
        '"key/value heads": tensor',
        _OF_RULES,
    ),
    Fault(
        "an axis that is named twice is not refused",
        _MESH,
        "axis not in AXES or axis in sizes or",
        "axis not in AXES or",
        "tests/parallel/test_mesh.py",
    ),
    Fault(
        "outputs of heads are on every device",
        _PARTITIONER,
        "is_split = is_output and leaf.shape[0] % self.tensor == 0",
        "is_split = False",
        f"{_ON_DEVICES}/test_placement.py::test_what_is_loaded_for_a_strategy_is_placed_beside_the_model",
    ),
    Fault(
        "padding of heads repeats the last head",
        "jaxinfer/models/padding.py",
        'jnp.take(parameter, places, axis=axis, mode="fill", fill_value=0)',
        'jnp.take(parameter, places, axis=axis, mode="clip")',
        f"{_LOGITS}[llama-tensor=4-1]",
    ),
    Fault(
        "tokens leave a ring in its own order",
        "jaxinfer/decoding/step.py",
        "return in_text_order(hidden_BTD, model.decoder.backend), cache",
        "return hidden_BTD, cache",
        f"{_ON_DEVICES}/test_logits.py::test_logits_of_prompts_around_a_ring_are_those_of_one_device",
    ),
    Fault(
        "what a ring finds in the future is seen",
        "jaxinfer/ops/ring_attention.py",
        "(key_1T[:, None, :] <= query_1T[:, :, None]) & in_window",
        "in_window",
        f"{_ON_DEVICES}/test_sequence.py::test_a_ring_attends_to_what_one_device_attends_to",
    ),
    Fault(
        "parts of split slots are joined without a common maximum",
        "jaxinfer/ops/split_slots.py",
        "largest_BTN = lax.pmax(partial.largest_BTN, axis)",
        "largest_BTN = partial.largest_BTN",
        f"{_TOKENS}::test_tokens_that_devices_find_in_their_own_slots_are_those_of_one_device",
    ),
    Fault(
        "slots of another device are written around the end of one's own",
        "jaxinfer/ops/split_slots.py",
        "jnp.where(here_BT < 0, num_slots, here_BT)",
        "here_BT % num_slots",
        f"{_TOKENS}::test_tokens_are_those_of_one_device[jacobi]",
    ),
    Fault(
        "a mesh's products are left to XLA",
        "jaxinfer/ops/matmul.py",
        "if not (math.prod(lead) and",
        "if backend.mesh is not None or not (math.prod(lead) and",
        _BITS,
    ),
    Fault(
        "parts of a sum stay on their devices",
        "jaxinfer/ops/matmul.py",
        "return outputs if in_axis is None else",
        "return outputs if True else",
        f"{_LOGITS}[llama-tensor=4-1]",
    ),
    Fault(
        "a mesh's attention is left to XLA",
        "jaxinfer/ops/attention.py",
        "kernels = backend.cpu_kernels and query_BTNH.size",
        "kernels = backend.cpu_kernels and backend.mesh is None and query_BTNH.size",
        _BITS,
    ),
    Fault(
        "a mesh's norms are left to XLA",
        "jaxinfer/models/norm.py",
        "has_kernel = self.backend.cpu_kernels and",
        "has_kernel = self.backend.cpu_kernels and self.backend.mesh is None and",
        _LOGITS,
    ),
    Fault(
        "a mesh's sums over the vocabulary are left to XLA",
        "jaxinfer/sampling/mass.py",
        "return backend.cpu_kernels and",
        "return backend.cpu_kernels and backend.mesh is None and",
        f"{_TOKENS}::test_tokens_are_those_of_one_device",
    ),
    Fault(
        "a CPU's devices join what they find in their own slots",
        "jaxinfer/ops/split_slots.py",
        "in_order = on_one_device(backend), backend.keeps_bits",
        "in_order = on_one_device(backend), False",
        f"{_TOKENS}::test_tokens_are_those_of_one_device[jacobi]",
    ),
    Fault(
        "a CPU's prompts go around a ring",
        "jaxinfer/ops/ring_attention.py",
        "backend.slot_shards > 1 and not backend.keeps_bits and",
        "backend.slot_shards > 1 and",
        f"{_LOGITS}[llama-data=2,sequence=2-1]",
    ),
    Fault(
        "microbatches are joined in the order of devices",
        _PIPELINE,
        "return jnp.moveaxis(apart, axis, axis + 1).reshape(*lead, count * rows, *rest)",
        "return apart.reshape(*lead, count * rows, *rest)",
        f"{_LOGITS}[llama-data=2,pipeline=2-3]",
    ),
    Fault(
        "stages do not wait for their first microbatch",
        _PIPELINE,
        "turn = time - (stage - span.first)",
        "turn = time - 0 * stage",
        f"{_LOGITS}[llama-data=2,pipeline=2-3]",
    ),
    Fault(
        "on a mesh the groups of a kernel are not padded like its codes",
        "jaxinfer/ops/few_bits/split.py",
        "-1, units[:, None] * each + np.arange(each)",
        '-1, (units[:, None] if part_name == "codes" else 0) * each + np.arange(each)',
        f"{_FEW_BITS}::test_inputs_move_in_whole_groups_with_their_scales",
    ),
    Fault(
        "devices multiply their inputs by a kernel's codes in few bits and do not add up",
        "jaxinfer/ops/matmul.py",
        "outputs = [output.reshape(*lead, -1) for output in outputs]",
        "return [output.reshape(*lead, -1) for output in outputs]",
        f"{_FEW_BITS}::test_logits_are_those_of_one_device",
    ),
    Fault(
        "padding may cut a group of weights in few bits",
        "jaxinfer/ops/few_bits/split.py",
        "if follows.all() and",
        "if",
        f"{_FEW_BITS}::test_padding_cuts_no_group",
    ),
    Fault(
        "fingerprints of weights in few bits depend on the mesh",
        "jaxinfer/models/fingerprint.py",
        "changed).dequantize()[..., inputs]",
        "changed).dequantize()",
        f"{_FEW_BITS}::test_logits_are_those_of_one_device",
    ),
    Fault(
        "sums in bytes are rounded down",
        "jaxinfer/ops/quantized_sums.py",
        "jnp.round(numbers / ",
        "jnp.floor(numbers / ",
        f"{_ON_DEVICES}/test_quantized_sums.py",
    ),
    Fault(
        "a device's sum in bytes is that of its first blocks alone",
        "jaxinfer/ops/quantized_sums.py",
        "functools.reduce(operator.add, parts)",
        "functools.reduce(operator.add, parts[:2])",
        f"{_ON_DEVICES}/test_quantized_sums.py",
    ),
)
