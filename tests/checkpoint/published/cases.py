"""Every format of published checkpoints that is read, as a ``quantization_config`` and what packs a matrix so."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.checkpoint.published.packing import (
    BFLOAT16,
    Case,
    awq,
    compressed_integers,
    floats,
    four_bits,
    gptq,
    int8_rows,
    of_class,
    ternary,
)

_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False, "damp_percent": 0.1}
_AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "modules_to_not_convert": ["lm_head"]}
_BNB = {
    "quant_method": "bitsandbytes",
    "_load_in_4bit": True,
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "llm_int8_skip_modules": None,
    "llm_int8_threshold": 6.0,
}
_BITNET = {"quant_method": "bitnet", "linear_class": "bitlinear", "quantization_mode": "offline"}
_INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True, "observer": None}


def _gptq(**options: Any) -> Case:
    names = {"group": "group_size", "symmetric": "sym", "act_order": "desc_act"}
    version = options.get("version", 1)
    keys = {names.get(key, key): value for key, value in options.items() if key not in ("version", "dtype")}
    config = {**_GPTQ, **keys, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    return Case(config, functools.partial(gptq, **options))


def _compressed(form: str, pack: Any, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> Case:
    scheme = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "observer": "minmax", **weights}
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": inputs, "output_activations": None}
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
        "ignore": ["lm_head"],
        "global_compression_ratio": None,
    }
    return Case(config, pack)


def _packed(bits: int = 4, group: int | None = 32, symmetric: bool = True, act_order: bool = False) -> Case:
    weights = {"num_bits": bits, "symmetric": symmetric, "actorder": "group" if act_order else None}
    weights |= {"strategy": "group" if group else "channel", "group_size": group}
    pack = functools.partial(compressed_integers, bits=bits, group=group, symmetric=symmetric, act_order=act_order)
    return _compressed("pack-quantized", pack, weights)


def _integers(strategy: str, symmetric: bool = True) -> Case:
    pack = functools.partial(
        compressed_integers, bits=8, group=None, symmetric=symmetric, packed=False, whole=strategy == "tensor"
    )
    return _compressed("int-quantized", pack, {"strategy": strategy, "symmetric": symmetric}, _INPUTS)


def _floats(strategy: str, block: tuple[int, int] | None) -> Case:
    pack = functools.partial(floats, block=(1, 1 << 20) if strategy == "channel" else block, dtype=BFLOAT16)
    weights = {"type": "float", "strategy": strategy, "block_structure": list(block) if block else None}
    return _compressed("float-quantized", pack, weights)


def _of_class(**options: Any) -> Case:
    how = {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}}
    config = {"quant_method": "torchao", "quant_type": how, "modules_to_not_convert": None}
    config |= {"include_input_output_embeddings": False, "untie_embedding_weights": False}
    return Case(config, functools.partial(of_class, **options))


CASES: Mapping[str, Case] = {
    "gptq": _gptq(),
    "gptq_v2_asymmetric": _gptq(version=2, symmetric=False, group=64),
    "gptq_asymmetric_32": _gptq(symmetric=False, group=32),
    "gptq_act_order": _gptq(act_order=True, symmetric=False, group=32),
    "gptq_rows": _gptq(group=-1, symmetric=False),
    "gptq_8_bits": _gptq(bits=8, group=64, symmetric=False),
    "gptq_8_bits_symmetric": _gptq(bits=8, group=-1, dtype=BFLOAT16),
    "gptq_last_group_short": _gptq(group=96)._replace(widened=True),
    "awq": Case({**_AWQ, "group_size": 64}, functools.partial(awq, group=64)),
    "compressed_int4": _packed(),
    "compressed_int4_asymmetric": _packed(group=128, symmetric=False),
    "compressed_int4_act_order": _packed(act_order=True),
    "compressed_int4_rows": _packed(group=None),
    "compressed_int8_packed": _packed(bits=8, symmetric=False),
    "compressed_int8": _integers("channel"),
    "compressed_int8_asymmetric": _integers("channel", symmetric=False),
    "compressed_int8_tensor": _integers("tensor"),
    "compressed_fp8": _floats("channel", None),
    "compressed_fp8_tensor": _floats("tensor", None),
    "compressed_fp8_blocks": _floats("block", (64, 32)),
    "fp8_blocks": Case(
        {**_FP8, "weight_block_size": [128, 128]},
        functools.partial(floats, block=(128, 128), name="weight_scale_inv"),
    ),
    "fp8_blocks_bfloat16": Case(
        {**_FP8, "weight_block_size": [128, 128]},
        functools.partial(floats, block=(128, 128), name="weight_scale_inv", dtype=BFLOAT16),
    ),
    "fp8_ragged_blocks": Case(
        {**_FP8, "weight_block_size": [48, 96]},
        functools.partial(floats, block=(48, 96), name="weight_scale_inv"),
        widened=True,
    ),
    "fp8": Case({**_FP8, "weight_block_size": None}, functools.partial(floats, name="weight_scale_inv")),
    "fp8_static": Case({**_FP8, "activation_scheme": "static"}, floats),
    "fbgemm_fp8": Case(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        functools.partial(floats, block=(1, 1 << 20)),
    ),
    "nf4": Case(_BNB, four_bits),
    "nf4_plain_scales": Case(
        {**_BNB, "bnb_4bit_use_double_quant": False, "bnb_4bit_quant_storage": "float16"},
        functools.partial(four_bits, nested=False, storage=np.float16),
    ),
    "fp4": Case({**_BNB, "bnb_4bit_quant_type": "fp4"}, functools.partial(four_bits, kind="fp4", block=256)),
    "bitnet": Case({**_BITNET, "linear_class": "autobitlinear"}, ternary),
    "bitnet_divided": Case(_BITNET, functools.partial(ternary, divides=True)),
    "bitnet_online": Case(
        {**_BITNET, "linear_class": "autobitlinear", "quantization_mode": "online"},
        functools.partial(ternary, packed=False),
    ),
    "torchao_int8": _of_class(),
    "torchao_int8_asymmetric": _of_class(symmetric=False, block=(64, 128)),
    "torchao_int4": _of_class(kind="Int4Tensor", block=(1, 64), bits=4),
    "torchao_int4_rows": _of_class(kind="Int4Tensor", bits=4),
    "torchao_int4_in_bytes": _of_class(kind="IntxUnpackedToInt8Tensor", block=(1, 32), bits=4),
    "torchao_int3_in_bytes": _of_class(kind="IntxUnpackedToInt8Tensor", block=(1, 32), bits=3, symmetric=False),
    "torchao_fp8": _of_class(kind="Float8Tensor"),
    "llm_int8": Case({**_BNB, "_load_in_4bit": False, "load_in_4bit": False, "load_in_8bit": True}, int8_rows),
}
