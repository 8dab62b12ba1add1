"""AWQ's files: codes and zeros packed along the outputs, eight at a time in an order of their own.

Facts of AutoAWQ's version "gemm": ``qweight`` is ``[K, N / 8]``, ``qzeros`` ``[G, N / 8]`` and ``scales`` ``[G, N]``.
"""

import numpy as np

from jaxinfer.checkpoint.published.coded_matrix import CodedMatrix, even_groups
from jaxinfer.checkpoint.published.quantization_keys import QuantizationKeys
from jaxinfer.checkpoint.published.scheme import Scheme
from jaxinfer.checkpoint.published.stored import Layer, Stored, unpack
from jaxinfer.ops.few_bits.formats import UNSIGNED

# Where each of eight outputs is in a word.
_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])
# The second half are GPTQ's, which transformers writes for AWQ too.
_WITHOUT_EFFECT = """
    backend do_fuse exllama_config fuse_max_seq_len modules_to_fuse
    tokenizer dataset damp_percent desc_act act_group_aware sym true_sequential meta model_seqlen batch_size
    block_name_to_quantize module_name_preceding_first_block modules_in_block_to_quantize pad_token_id
    max_input_length cache_block_outputs
"""


def read_awq(keys: QuantizationKeys) -> Scheme:
    """Return how a checkpoint of ``quant_method`` awq is read."""
    keys.one_of("bits", (4,))
    group = keys.group_size("group_size")
    keys.one_of("zero_point", (True,), True)
    for key in ("version", "format"):
        keys.one_of(key, ("gemm", "GEMM"), "gemm")
    keys.words("modules_to_not_convert")  # they are stored as plain numbers
    keys.without_effect(_WITHOUT_EFFECT)

    def layers(stored: Stored) -> dict[str, Layer]:
        return {f"{module}.weight": _layer(stored, module, group) for module in stored.ending_in(".qweight")}

    return keys.finish(Scheme("awq, 4 bits", layers))


def _layer(stored: Stored, module: str, group: int | None) -> Layer:
    width, words = stored.matrix_shape(f"{module}.qweight")
    outputs, group = words * 8, group or width
    parts = (f"{module}.qweight", f"{module}.qzeros", f"{module}.scales")
    if width % group:
        raise stored.wrong(parts[0], f"has {width} inputs, which groups of {group} do not divide")

    def outputs_of(name: str, rows: int) -> np.ndarray:
        codes = unpack(stored.read(name, (rows, words), "int32"), 4).reshape(rows, words, 8)
        return codes[..., _PLACES].reshape(rows, outputs).T

    def read() -> CodedMatrix:
        zeros = outputs_of(parts[1], width // group).astype(np.int8)
        scales = stored.scales(parts[2], (width // group, outputs)).T
        stored.check(parts[0], (width, words), "int32")
        return CodedMatrix(4, lambda: outputs_of(parts[0], width), scales, even_groups(width, group), UNSIGNED, zeros)

    return Layer(parts, (outputs, width), read)
