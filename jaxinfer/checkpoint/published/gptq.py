"""GPTQ's files: codes packed along the inputs, zeros along the outputs, and the group of each input.

Facts of AutoGPTQ's and GPTQModel's files: ``qweight`` is ``[K * bits / 32, N]``, ``qzeros`` ``[G, N * bits / 32]``,
``scales`` ``[G, N]`` and ``g_idx`` ``[K]``. Files of the first version have each zero minus one. GPTQModel's
``dynamic`` gives modules other bits: its keys are regular expressions for the beginning of a module's name, of which
the first that matches counts, after ``+:``, which may be left out, or ``-:``, with which modules stay plain numbers.
"""

import re
from typing import NamedTuple

import numpy as np

from jaxinfer.checkpoint.published.coded_matrix import CodedMatrix, even_groups
from jaxinfer.checkpoint.published.quantization_keys import QuantizationKeys
from jaxinfer.checkpoint.published.scheme import Scheme
from jaxinfer.checkpoint.published.stored import Layer, Stored, unpack
from jaxinfer.errors import InvalidCheckpoint
from jaxinfer.ops.few_bits.formats import SIGNED, UNSIGNED

_BITS = (4, 8)
_PLAIN, _OTHER = "-:", "+:"
_WITHOUT_EFFECT = """
    desc_act damp_percent damp_auto_increment static_groups true_sequential model_name_or_path model_file_base_name
    dataset tokenizer batch_size block_name_to_quantize cache_block_outputs exllama_config use_exllama disable_exllama
    max_input_length use_cuda_fp16 model_seqlen module_name_preceding_first_block modules_in_block_to_quantize
    pad_token_id backend meta mse act_group_aware lm_head
"""
_WITHOUT_EFFECT_ON_SOME = "desc_act damp_percent damp_auto_increment static_groups mse act_group_aware"


class _Kind(NamedTuple):
    """How a matrix is stored: of ``group`` inputs each, or all, with a scale."""

    bits: int
    group: int | None
    is_symmetric: bool


def read_gptq(keys: QuantizationKeys) -> Scheme:
    """Return how a checkpoint of ``quant_method`` gptq is read."""
    kind = _Kind(keys.one_of("bits", _BITS), keys.group_size("group_size"), keys.boolean("sym", default=True))
    formats = tuple(
        keys.one_of(key, ("gptq", "gptq_v2"), "") for key in ("checkpoint_format", "format") if keys.has(key)
    )
    if len(set(formats)) > 1:
        raise keys.refuse("format", formats[1], f"checkpoint_format is {formats[0]}")
    added = 0 if "gptq_v2" in formats else 1
    keys.one_of("pack_dtype", ("int32",), "int32")
    keys.one_of("method", ("gptq",), "gptq")
    others = _read_dynamic(keys, kind)
    keys.empty("rotation", "adapter", "is_marlin_format")
    keys.without_effect(_WITHOUT_EFFECT)

    def layers(stored: Stored) -> dict[str, Layer]:
        return {
            f"{module}.weight": _layer(stored, module, _kind_of(stored, module, others) or kind, added)
            for module in stored.ending_in(".qweight")
        }

    bits = " and ".join(dict.fromkeys(f"{each.bits} bits" for each in (kind, *others.values()) if each is not None))
    return keys.finish(Scheme(f"gptq, {bits}", layers))


def _read_dynamic(keys: QuantizationKeys, kind: _Kind) -> dict[re.Pattern[str], _Kind | None]:
    """Return how modules are stored whose names begin so; None: as plain numbers."""
    found: dict[re.Pattern[str], _Kind | None] = {}
    section = keys.section("dynamic")
    for name in () if section is None else section.names():
        assert section is not None
        own = section.section(name)
        try:
            pattern = re.compile(name.removeprefix(_PLAIN).removeprefix(_OTHER))
        except (re.error, RecursionError):
            raise keys.refuse("dynamic", name, "it is no regular expression") from None
        if name.startswith(_PLAIN) or own is None:
            found[pattern] = None if name.startswith(_PLAIN) else kind
            continue
        bits = own.one_of("bits", _BITS, kind.bits)
        group = own.group_size("group_size") if own.has("group_size") else kind.group
        found[pattern] = _Kind(bits, group, own.boolean("sym", default=kind.is_symmetric))
        own.without_effect(_WITHOUT_EFFECT_ON_SOME)
        own.finish(None)
    return found


def _kind_of(stored: Stored, module: str, others: dict[re.Pattern[str], _Kind | None]) -> _Kind | None:
    """Return how a module is stored if not as others are."""
    for pattern, kind in others.items():
        if pattern.match(module):
            if kind is None:
                raise InvalidCheckpoint(f"{stored.origin}: {module} is quantized, but dynamic says that it is not")
            return kind
    return None


def _layer(stored: Stored, module: str, kind: _Kind, added: int) -> Layer:
    bits, group, is_symmetric = kind
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
