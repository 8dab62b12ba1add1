"""Published checkpoints that are not understood, or are damaged: one line that names what and where."""

import json
from collections.abc import Callable

import numpy as np
import pytest

from jaxinfer.checkpoint.hf_folder import open_hf_folder
from jaxinfer.checkpoint.published.tensors import PublishedTensors
from jaxinfer.errors import InvalidCheckpoint, JaxinferError, UnsupportedModel
from tests.checkpoint.published.cases import CASES
from tests.checkpoint.published.folders import as_torch, write_folder
from tests.checkpoint.published.packing import Tensors
from tests.late_imports import late

late("torch")
pytestmark = pytest.mark.parity

OUTPUTS, WIDTH = 64, 128
NAME = "m.q_proj"
Config = dict


def read(tmp_path, name: str, edit: Callable[[Config, Tensors], None]) -> None:
    """Write one matrix as a case packs it, but edited; read it in few bits and as plain numbers."""
    case = CASES[name]
    tensors, _ = case.pack(np.random.default_rng(0), OUTPUTS, WIDTH)
    config = json.loads(json.dumps(case.config))
    tensors = dict(tensors)
    edit(config, tensors)
    written = {f"{NAME}.{part}": values for part, values in tensors.items()}
    write_folder(tmp_path, written, {"quantization_config": config})
    source = open_hf_folder(tmp_path).tensors
    assert isinstance(source, PublishedTensors)
    for weight in source.shapes():
        source.read(weight, np.dtype(np.float32))
        if source.forms().get(weight):
            source.quantized(weight)


def key(name, value, where=()):
    def edit(config, tensors):
        for part in where:
            config = config[part]
        config[name] = value

    return edit


def cut(name, rows=1):
    return lambda config, tensors: tensors.update({name: tensors[name][:-rows]})


def without(name):
    return lambda config, tensors: tensors.pop(name)


def only_plain(config, tensors):
    tensors.clear()
    tensors["weight"] = np.ones((OUTPUTS, WIDTH), np.float32)


def put(name, place, value):
    def edit(config, tensors):
        tensors[name] = tensors[name].copy()
        tensors[name].reshape(-1)[place] = value

    return edit


def cast(name, dtype):
    return lambda config, tensors: tensors.update({name: tensors[name].astype(dtype)})


def state(**changes):
    def edit(config, tensors):
        name = "weight.quant_state.bitsandbytes__nf4"
        found = {**json.loads(tensors[name].tobytes()), **changes}
        tensors[name] = np.frombuffer(json.dumps(found).encode(), np.uint8)

    return edit


def described(**changes):
    def edit(config, tensors):
        found = json.loads(tensors["weight"])
        found["_data"] |= changes.pop("data", {})
        tensors["weight"] = json.dumps({**found, **changes})

    return edit


GROUP = ("config_groups", "group_0")
CONFIGS = [
    ("gptq", key("quant_method", "quark"), "quant_method = 'quark'"),
    ("gptq", key("quant_method", ["gptq"]), "quant_method = ['gptq']"),
    ("gptq", key("quant_method", "nvfp4"), "quant_method = 'nvfp4'"),
    ("gptq", key("bits", 3), "bits = 3"),
    ("gptq", key("bits", True), "bits = True"),
    ("gptq", key("group_size", 0), "group_size = 0"),
    ("gptq", key("group_size", "128"), "group_size = '128'"),
    ("gptq", key("sym", "yes"), "sym = 'yes'"),
    ("gptq", key("checkpoint_format", "marlin"), "checkpoint_format = 'marlin'"),
    ("gptq", key("format", "gptq_v2"), "format = 'gptq_v2'"),
    ("gptq", key("dynamic", {"+:.*q_proj": {"bits": 3}}), "dynamic.+:.*q_proj.bits = 3"),
    ("gptq", key("dynamic", {".*q_proj": {"rotation": "up"}}), "dynamic..*q_proj.rotation = 'up'"),
    ("gptq", key("dynamic", {"+:(": {"bits": 4}}), "dynamic = '+:(' is not supported: it is no regular expression"),
    ("gptq", key("dynamic", ["q_proj"]), "dynamic = ['q_proj']"),
    ("gptq", key("rounding", "up"), "rounding = 'up'"),
    ("bitnet", key("linear_class", "linear"), "linear_class = 'linear'"),
    ("bitnet", key("use_rms_norm", True), "use_rms_norm = True"),
    ("bitnet_online", key("modules_to_not_convert", ["("]), "modules_to_not_convert = '('"),
    ("awq", key("version", "gemv"), "version = 'gemv'"),
    ("awq", key("zero_point", False), "zero_point = False"),
    ("awq", key("modules_to_not_convert", "lm_head"), "modules_to_not_convert = 'lm_head'"),
    ("fp8_blocks", key("weight_block_size", [128]), "weight_block_size = [128]"),
    ("fp8_blocks", key("fmt", "e5m2"), "fmt = 'e5m2'"),
    ("fp8_blocks", key("scale_fmt", "e8m0"), "scale_fmt = 'e8m0'"),
    ("compressed_int4", key("format", "nvfp4-pack-quantized"), "format = 'nvfp4-pack-quantized'"),
    ("compressed_int4", key("kv_cache_scheme", {"num_bits": 8}), "kv_cache_scheme ="),
    ("compressed_int4", key("sparsity_config", {"format": "sparse-24-bitmask"}), "sparsity_config.format ="),
    ("compressed_int4", key("config_groups", None), "config_groups = None"),
    ("compressed_int4", key("num_bits", 3, (*GROUP, "weights")), "group_0.weights.num_bits = 3"),
    ("compressed_int4", key("group_size", None, (*GROUP, "weights")), "group_0.weights.group_size = None"),
    ("compressed_int4", key("rotation", "hadamard", (*GROUP, "weights")), "group_0.weights.rotation"),
    ("compressed_int4", key("output_activations", {"num_bits": 8}, GROUP), "group_0.output_activations ="),
    ("nf4", key("load_in_8bit", True), "load_in_8bit = True"),
    ("nf4", key("bnb_4bit_quant_type", "int4"), "bnb_4bit_quant_type = 'int4'"),
    ("nf4", key("bnb_5bit", True), "bnb_5bit = True"),
    ("torchao_int8", key("quant_type", None), "quant_type = None"),
    ("torchao_int8", key("untie_embedding_weights", True), "untie_embedding_weights = True"),
]
FILES = [
    ("gptq", key("dynamic", {"-:.*q_proj": {}}), f"{NAME} is quantized, but dynamic says that it is not"),
    ("gptq", put("scales", 3, np.nan), f"{NAME}.scales has a scale that is no finite number"),
    ("gptq", cut("scales", 1), f"{NAME}.scales has shape"),
    ("gptq", cut("qweight", 4), f"{NAME}.g_idx has shape"),
    ("gptq", cast("scales", np.int32), f"{NAME}.scales has type int32"),
    ("gptq", cast("qweight", np.int64), f"{NAME}.qweight has type int64"),
    ("gptq", without("scales"), f"missing tensor {NAME}.scales"),
    ("gptq", without("qweight"), f"{NAME}.g_idx has type int32, but nothing says"),
    ("gptq", only_plain, "holds no weights of gptq, 4 bits"),
    ("gptq", put("g_idx", 5, 1), f"{NAME}.g_idx has a group that is none of 0 to 0"),
    ("gptq", put("g_idx", 5, -1), f"{NAME}.g_idx has a group"),
    ("gptq_asymmetric_32", lambda config, tensors: tensors.update(qweight=tensors["qweight"][0]), "must be a matrix"),
    ("awq", key("group_size", 48), f"{NAME}.qweight has 128 inputs, which groups of 48 do not divide"),
    ("awq", cut("qzeros"), f"{NAME}.qzeros has shape"),
    ("compressed_int4", key("group_size", 96, (*GROUP, "weights")), "which groups of 96 do not divide"),
    ("compressed_int4", put("weight_shape", 1, 1 << 40), f"{NAME}.weight_shape says"),
    ("compressed_int4", put("weight_shape", 0, 0), f"{NAME}.weight_shape says"),
    ("compressed_int4", put("weight_scale", 0, np.inf), f"{NAME}.weight_scale has a scale"),
    ("compressed_int4", key("ignore", [NAME]), f"{NAME} is quantized, but the configuration's ignore names it"),
    ("compressed_int4", key("targets", ["re:.*k_proj"], GROUP), f"{NAME} is quantized, but it is no target"),
    ("compressed_int4", key("targets", ["re:("], GROUP), "'re:(' is no regular expression"),
    ("compressed_int4_act_order", put("weight_g_idx", 0, 4), f"{NAME}.weight_g_idx has a group"),
    ("compressed_int4_asymmetric", without("weight_zero_point"), f"missing tensor {NAME}.weight_zero_point"),
    ("compressed_int4_asymmetric", key("symmetric", True, (*GROUP, "weights")), "weight_zero_point has zero points"),
    ("compressed_int8_asymmetric", key("symmetric", True, (*GROUP, "weights")), "weight_zero_point has zero points"),
    ("compressed_int8", without("weight_scale"), f"{NAME}.weight has type int8"),
    ("fp8_blocks", put("weight", 9, np.nan), f"{NAME}.weight has weights that are no numbers"),
    ("fp8_blocks", cast("weight", np.float32), f"{NAME}.weight has type float32"),
    ("fp8_blocks", without("weight"), f"missing tensor {NAME}.weight"),
    ("nf4", state(blocksize=0), "bitsandbytes__nf4 has no usable blocksize"),
    ("nf4", state(shape=[64]), "bitsandbytes__nf4 has no usable shape"),
    ("nf4", state(shape=[64, 256]), f"{NAME}.weight does not hold the 64 rows of 256 weights"),
    ("nf4", state(nested_offset="nan"), "bitsandbytes__nf4 has no usable nested_offset"),
    ("nf4", put("weight.quant_state.bitsandbytes__nf4", 0, 0), "bitsandbytes__nf4 is no JSON object"),
    ("nf4", put("weight.quant_map", 3, 0.5), f"{NAME}.weight.quant_map has other levels than nf4"),
    ("nf4_plain_scales", put("weight.absmax", 0, np.inf), f"{NAME}.weight.absmax has a scale"),
    ("torchao_int8", described(_type="MXTensor"), f"{NAME}.weight is of class 'MXTensor'"),
    ("torchao_int8", described(data={"rotation": 1}), f"{NAME}.weight has 'rotation', which is not known"),
    ("torchao_int8", described(data={"block_size": [1, 96]}), f"{NAME}.weight has blocks of [1, 96]"),
    ("torchao_int8", lambda config, tensors: tensors.update(weight="{"), "described by no JSON object"),
    ("torchao_int8", cut("_weight_scale"), f"{NAME}._weight_scale has shape"),
    ("bitnet", put("weight", 5, 255), f"{NAME}.weight has weights that are none of -1, 0 and 1"),
    ("bitnet", put("weight_scale", 0, np.inf), f"{NAME}.weight_scale has a scale"),
    ("bitnet", only_plain, "holds no weights of bitnet"),
    ("bitnet_divided", put("weight_scale", 0, 0), f"{NAME}.weight_scale is zero"),
    ("bitnet_online", put("weight", 3, np.nan), f"{NAME}.weight has weights that are no numbers"),
    ("torchao_int8", put("_weight_scale", 3, np.nan), f"{NAME}._weight_scale has a scale"),
    ("torchao_int4_in_bytes", put("_weight_qdata", 0, 9), f"{NAME}._weight_qdata has a number of more than 4 bits"),
    ("torchao_fp8", put("_weight_qdata", 0, np.nan), f"{NAME}._weight_qdata has weights that are no numbers"),
    ("llm_int8", put("weight_format", 0, 2), f"{NAME}.weight_format is no order of rows"),
]


def names(cases):
    return [f"{name}: {expected}" for name, _, expected in cases]


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_edited_is_read(tmp_path, case):
    read(tmp_path, case, lambda config, tensors: None)


@pytest.mark.parametrize(("case", "edit", "expected"), CONFIGS, ids=names(CONFIGS))
def test_what_a_configuration_asks_for_is_known_or_refused(tmp_path, case, edit, expected):
    with pytest.raises(UnsupportedModel) as caught:
        read(tmp_path, case, edit)
    assert expected in str(caught.value)


@pytest.mark.parametrize(("case", "edit", "expected"), FILES, ids=names(FILES))
def test_damage_is_named(tmp_path, case, edit, expected):
    with pytest.raises(InvalidCheckpoint) as caught:
        read(tmp_path, case, edit)
    assert expected in str(caught.value)
    assert str(tmp_path) in str(caught.value) or "config.json" in str(caught.value)


@pytest.mark.parametrize("value", [[], "gptq", 4, True])
def test_a_configuration_is_an_object(tmp_path, value):
    write_folder(tmp_path, {"w": as_torch(np.ones(2, np.float32))}, {"quantization_config": value})
    with pytest.raises(JaxinferError, match="is no object"):
        open_hf_folder(tmp_path)
