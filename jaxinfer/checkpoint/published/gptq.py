"""GPTQ's files: codes packed along the inputs, zeros along the outputs, and the group of each input.

Facts of AutoGPTQ's and GPTQModel's files: ``qweight`` is ``[K * bits / 32, N]``, ``qzeros`` ``[G, N * bits / 32]``,
``scales`` ``[G, N]`` and ``g_idx`` ``[K]``. Files of the first version have each zero minus one.
"""

import numpy as np

from jaxinfer.checkpoint.published.coded_matrix import CodedMatrix, even_groups
from jaxinfer.checkpoint.published.quantization_keys import QuantizationKeys
from jaxinfer.checkpoint.published.scheme import Scheme
from jaxinfer.checkpoint.published.stored import Layer, Stored, unpack
from jaxinfer.ops.few_bits.formats import SIGNED, UNSIGNED

_WITHOUT_EFFECT = """
    desc_act damp_percent damp_auto_increment static_groups true_sequential model_name_or_path model_file_base_name
    dataset tokenizer batch_size block_name_to_quantize cache_block_outputs exllama_config use_exllama disable_exllama
    max_input_length use_cuda_fp16 model_seqlen module_name_preceding_first_block modules_in_block_to_quantize
    pad_token_id backend meta mse act_group_aware lm_head
"""


def read_gptq(keys: QuantizationKeys) -> Scheme:
    """Return how a checkpoint of ``quant_method`` gptq is read."""
    bits = keys.one_of("bits", (4, 8))
    group = keys.group_size("group_size")
    is_symmetric = keys.boolean("sym", default=True)
    formats = tuple(
        keys.one_of(key, ("gptq", "gptq_v2"), "") for key in ("checkpoint_format", "format") if keys.has(key)
    )
    if len(set(formats)) > 1:
        raise keys.refuse("format", formats[1], f"checkpoint_format is {formats[0]}")
    added = 0 if "gptq_v2" in formats else 1
    keys.one_of("pack_dtype", ("int32",), "int32")
    keys.one_of("method", ("gptq",), "gptq")
    keys.empty("dynamic", "rotation", "adapter", "is_marlin_format")
    keys.without_effect(_WITHOUT_EFFECT)

    def layers(stored: Stored) -> dict[str, Layer]:
        return {
            f"{module}.weight": _layer(stored, module, bits, group, is_symmetric, added)
            for module in stored.ending_in(".qweight")
        }

    return keys.finish(Scheme(f"gptq, {bits} bits", layers))


def _layer(stored: Stored, module: str, bits: int, group: int | None, is_symmetric: bool, added: int) -> Layer:
    words, outputs = stored.matrix_shape(f"{module}.qweight")
    width = words * 32 // bits
    num_groups = -(-width // (group or width))
    parts = [f"{module}.{name}" for name in ("qweight", "qzeros", "scales", "g_idx")]
    has_places = parts[3] in stored.shapes

    middle = 1 << bits - 1

    def codes() -> np.ndarray:
        found = unpack(stored.read(parts[0], (words, outputs), "int32").T, bits)
        return found ^ middle if bits == 8 else found

    def read() -> CodedMatrix:
        stored.check(parts[0], (words, outputs), "int32")
        zeros = unpack(stored.read(parts[1], (num_groups, outputs * bits // 32), "int32"), bits).T
        zeros = (zeros.astype(np.int16) + added) & ((1 << bits) - 1)
        scales = stored.scales(parts[2], (num_groups, outputs)).T
        groups = even_groups(width, group or width)
        if has_places:
            groups = stored.read(parts[3], (width,), "int32", "int64")
            if groups.min() < 0 or groups.max() >= num_groups:
                raise stored.wrong(parts[3], f"has a group that is none of 0 to {num_groups - 1}; download it again")
        if is_symmetric and (zeros == middle).all():
            return CodedMatrix(bits, codes, scales, groups, SIGNED if bits == 4 else ())
        zeros = (zeros - middle if bits == 8 else zeros).astype(np.int8)
        return CodedMatrix(bits, codes, scales, groups, UNSIGNED if bits == 4 else (), zeros)

    return Layer(tuple(parts[: 3 + has_places]), (outputs, width), read)
