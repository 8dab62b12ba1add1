"""GGUF files of every architecture give the configuration and tensors of the Hugging Face model they were made of."""

import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.checkpoint.gguf.architectures.phi3 import PHI3
from jaxinfer.checkpoint.gguf.file import open_gguf
from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.errors import InvalidCheckpoint, JaxinferError, UnsupportedModel
from tests.checkpoint.examples import examples
from tests.checkpoint.gguf.architectures import CASES, build_model, gguf_tensors, hf_tensors, write_model
from tests.late_imports import late

late("torch")
late("transformers")
pytestmark = pytest.mark.parity

F32 = np.dtype(np.float32)
ARCHITECTURES = sorted({case.architecture for case in CASES.values()})
# Architectures that transformers reads from GGUF files itself.
_NOT_READ = ("gemma", "phi2", "olmo2", "smollm3", "granite", "glm4", "command-r", "cohere2")
READ_BY_TRANSFORMERS = [name for name in CASES if CASES[name].architecture not in _NOT_READ]
# Keys that a configuration of transformers has and that do not tell networks apart.
SILENT_KEYS = {"architectures", "partial_rotary_factor"}


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: build_model(case) for name, case in CASES.items()}


@pytest.fixture
def reopen(tmp_path, models):
    """Write a model as GGUF and open it."""

    def write_and_open(name: str, **options: Any) -> Checkpoint:
        path = tmp_path / "m.gguf"
        return open_gguf(write_model(path, CASES[name], models[name], fused=name.endswith("fused"), **options))

    return write_and_open


def headers_only(name: str, **keys: Any) -> dict[str, Any]:
    """Return the options that write a file of one norm, with keys of the architecture changed."""
    prefix = CASES[name].architecture
    changed = {f"{prefix}.{key.replace('__', '.')}": value for key, value in keys.items()}
    return {"tensors": {"output_norm.weight": np.ones(64, np.float32)}, "keys": changed}


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_comes_back_bit_equal(reopen, models, name):
    made, tensors = hf_tensors(models[name]), reopen(name).tensors
    assert tensors.shapes() == {key: values.shape for key, values in made.items()}
    for key, values in made.items():
        np.testing.assert_array_equal(tensors.read(key, F32).view(np.int32), values.view(np.int32), err_msg=key)


@pytest.mark.parametrize("name", CASES)
def test_the_configuration_makes_the_same_model_in_transformers(reopen, models, name):
    expected = models[name].config.to_dict()
    found = type(models[name].config)(**reopen(name).config).to_dict()
    # A stated default is no difference.
    yarn = found.get("rope_parameters", {})
    if yarn.get("rope_type") == "yarn":
        assert (yarn.pop("beta_fast"), yarn.pop("beta_slow")) == (32.0, 1.0)
    different = {key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key)}
    assert different <= SILENT_KEYS


@pytest.mark.slow
@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_tensors_equal_those_that_transformers_reads_from_the_file(tmp_path, models, name):
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = write_model(tmp_path / "m.gguf", CASES[name], models[name])
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=models[name])["tensors"]
    ours = open_gguf(path).tensors
    assert ours.shapes().keys() == theirs.keys()
    for key, values in theirs.items():
        np.testing.assert_array_equal(ours.read(key, F32), values.float().numpy(), err_msg=key)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("kind", ["Q8_0", "BF16"])
@pytest.mark.parametrize("name", ["gemma3", "phi2-fused", "phi3", "gpt2"])
def test_blocks_are_undone_before_the_values_are(reopen, models, name, kind, dtype):
    """Blocks run along the file's rows: splitting, transposing and shifting read the same values as from float32."""
    stored = gguf.GGMLQuantizationType[kind]
    tensors = reopen(name, kind=stored).tensors
    for key, values in hf_tensors(models[name]).items():
        turned = CASES[name].architecture == "gpt2" and ".h." in key
        if values.ndim > 1:
            rows = np.ascontiguousarray(values.T) if turned else values
            rows = gguf.quants.dequantize(gguf.quants.quantize(rows, stored), stored)
            values = rows.T if turned else rows
        found = tensors.read(key, np.dtype(dtype))
        assert found.dtype == dtype
        np.testing.assert_array_equal(found.astype(np.float32), values.astype(dtype).astype(np.float32), err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "part", "hf_name", "shape"),
    [
        ("gpt2", "attn_qkv", "transformer.h.0.attn.c_attn.weight", (12288, 1024)),
        ("phi2-fused", "attn_qkv", "model.layers.0.self_attn.v_proj.weight", (24576, 1024)),
    ],
)
def test_a_large_tensor_is_read_in_slabs(reopen, name, part, hf_name, shape):
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    heads = {"embedding_length": 8192, "attention__head_count": 64, "attention__head_count_kv": 64}
    options = headers_only(name, **heads, rope__dimension_count=32 if name != "gpt2" else None)
    options["tensors"] = {f"blk.0.{part}.weight": values}
    tensors = reopen(name, kind=gguf.GGMLQuantizationType.Q8_0, **options).tensors
    tracemalloc.start()
    try:
        found = tensors.read(hf_name, np.dtype(ml_dtypes.bfloat16))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    expected = values.T if name == "gpt2" else values[-8192:]
    assert found.shape == expected.shape
    np.testing.assert_allclose(found.astype(np.float32)[::64], expected[::64], atol=0.05)
    assert peak - found.nbytes < 20 * 2**20 < values.nbytes


@pytest.mark.parametrize(
    ("name", "layers", "model_dim", "heads", "head_dim", "expected"),
    [
        ("gemma2", 26, 2304, 8, 256, 256),
        ("gemma2", 46, 4608, 32, 128, 144),
        ("gemma3", 34, 2560, 8, 256, 256),
        ("gemma3", 62, 5376, 32, 128, 168),
    ],
)
def test_the_published_gemmas_divide_attention_by_what_their_folders_say(
    reopen, name, layers, model_dim, heads, head_dim, expected
):
    widths = {"attention__key_length": head_dim, "attention__value_length": head_dim}
    sizes = {"block_count": layers, "embedding_length": model_dim, "attention__head_count": heads}
    assert reopen(name, **headers_only(name, **sizes, **widths)).config["query_pre_attn_scalar"] == expected


def test_windows_of_gemma3_follow_the_keys(reopen):
    def kinds(**keys: Any) -> str:
        config = reopen("gemma3", **headers_only("gemma3", **keys)).config
        return "".join(kind[0] for kind in config["layer_types"])

    assert kinds() == "sssssfs"
    assert kinds(attention__sliding_window_pattern=3) == "ssfssfs"
    assert kinds(attention__sliding_window=None) == "fffffff"
    config = reopen("gemma3", **headers_only("gemma3", rope__freq_base_swa=2500.0)).config
    assert config["rope_parameters"]["sliding_attention"]["rope_theta"] == 2500.0


def test_an_image_tower_is_ignored_in_the_keys_and_refused_in_the_tensors(reopen):
    keys = {"vision__block_count": 27, "mm__tokens_per_image": 256}
    options = headers_only("gemma3", **keys)
    assert reopen("gemma3", **options).config == reopen("gemma3").config
    options["tensors"] = {"v.blk.0.attn_q.weight": np.ones((64, 64), np.float32)}
    with pytest.raises(UnsupportedModel, match=r"'v\.blk\.0\.attn_q\.weight' has no place.*plain gemma3 model"):
        reopen("gemma3", **options)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gemma", "<end_of_turn>", [2, 7]),
        ("gemma3", "<end_of_turn>", [2, 7]),
        ("qwen3", "<|im_end|>", [2, 7]),
        ("phi3", "<|end|>", [2, 7]),
        ("gpt2", "<|end|>", 2),
    ],
)
def test_the_end_of_a_turn_is_known_by_its_text(reopen, name, text, expected):
    tokens = [text if token == 7 else f"token {token}" for token in range(96)]
    options = headers_only(name)
    options["keys"] = {"tokenizer.ggml.tokens": tokens}
    assert reopen(name, **options).config["eos_token_id"] == expected


def test_a_scale_that_longrope_does_not_imply_is_stated(reopen, models):
    made = gguf_tensors(CASES["phi3-longrope"], hf_tensors(models["phi3-longrope"]))
    made |= {f"rope_factors_{word}.weight": np.full(6, 2.0, np.float32) for word in ("long", "short")}

    def scaling(**keys: Any) -> dict[str, Any]:
        options = headers_only("phi3-longrope", **keys) | {"tensors": made}
        return reopen("phi3-longrope", **options).config["rope_scaling"]

    implied = float(np.float32((1 + np.log(160 / 40) / np.log(40)) ** 0.5))
    assert "attention_factor" not in scaling(rope__scaling__attn_factor=implied)
    assert scaling(rope__scaling__attn_factor=1.25)["attention_factor"] == 1.25
    assert scaling()["attention_factor"] == 1.0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("key", "value"), [("expert_used_count", 8), ("attention__clamp_kqv", 0.5), ("a_key", "x")])
def test_experts_and_unknown_keys_are_refused_by_name(reopen, architecture, key, value):
    name = next(name for name, case in CASES.items() if case.architecture == architecture)
    shown = key.replace("__", ".")
    with pytest.raises(
        UnsupportedModel, match=rf"{architecture}\.{shown} = .* use a conversion of a plain {architecture}"
    ):
        reopen(name, **headers_only(name, **{key: value}))


@pytest.mark.parametrize(
    ("name", "keys", "named"),
    [
        ("qwen2", {"attention__key_length": 8}, r"qwen2\.attention\.key_length = 8"),
        ("qwen2", {"rope__scaling__type": "longrope"}, r"qwen2\.rope\.scaling\.type = 'longrope'"),
        ("qwen3", {"rope__dimension_count": 16}, r"qwen3\.rope\.dimension_count = 16"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, r"gemma2\.attn_logit_softcapping = -1\.0"),
        ("gemma3", {"rope__scaling__type": "yarn"}, r"gemma3\.rope\.scaling\.type = 'yarn'"),
        ("phi2", {"rope__dimension_count": 18}, r"phi2\.rope\.dimension_count = 18"),
        ("phi2", {"rope__dimension_count": 7}, r"phi2\.rope\.dimension_count = 7"),
        ("phi3", {"rope__scaling__type": "longrope"}, r"phi3\.rope\.scaling\.type = 'longrope'"),
        ("phi3", {"attention__head_count": 5}, r"phi3\.attention\.head_count = 5"),
        ("gpt2", {"attention__head_count_kv": 2}, r"gpt2\.attention\.head_count_kv = 2"),
    ],
)
def test_a_key_that_the_family_cannot_have_is_refused_by_name(reopen, name, keys, named):
    with pytest.raises(UnsupportedModel, match=named) as error:
        reopen(name, **headers_only(name, **keys))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("lengths", [{"long": 6}, {"short": 6}, {"long": 6, "short": 5}])
def test_longrope_needs_both_tensors_whole(reopen, lengths):
    options = headers_only("phi3-longrope")
    options["tensors"] |= {f"rope_factors_{word}.weight": np.ones(n, np.float32) for word, n in lengths.items()}
    with pytest.raises(InvalidCheckpoint, match=r"rope_factors_(short|long)\.weight must hold 6 positive numbers"):
        reopen("phi3-longrope", **options)


def test_tensors_that_do_not_fit_the_architecture_are_named(reopen, models):
    made = gguf_tensors(CASES["phi2-fused"], hf_tensors(models["phi2-fused"]), fused=True)
    cut = made | {"blk.1.attn_qkv.weight": made["blk.1.attn_qkv.weight"][:-16]}
    with pytest.raises(
        InvalidCheckpoint, match=r"'blk\.1\.attn_qkv\.weight' has shape \[176, 64\], not 12 heads of 16"
    ):
        reopen("phi2-fused", tensors=cut)
    twice = made | {"blk.1.attn_k.bias": made["blk.1.attn_qkv.bias"][:64]}
    with pytest.raises(InvalidCheckpoint, match=r"'blk\.1\.attn_.*' repeats another"):
        reopen("phi2-fused", tensors=twice)
    for name, tensor in (
        ("qwen2", "blk.0.ffn_gate_exps.weight"),
        ("qwen3", "blk.0.ssm_in.weight"),
        ("gemma", "output.weight"),
        ("phi3", "blk.0.attn_q.weight"),
        ("gpt2", "rope_freqs.weight"),
    ):
        with pytest.raises(UnsupportedModel, match=rf"'{tensor}' has no place"):
            reopen(name, tensors={tensor: np.ones((64, 64), np.float32)})


def test_a_bias_in_blocks_cannot_be_split(tmp_path, models):
    path = tmp_path / "m.gguf"
    bias = np.ones((1, 192), np.float32)
    kind, tensors = gguf.GGMLQuantizationType.Q8_0, {"blk.0.attn_qkv.bias": bias}
    write_model(path, CASES["phi2-fused"], models["phi2-fused"], kind=kind, tensors=tensors)
    # The writer quantizes matrices only; one row of a matrix with its second dimension struck out is a vector.
    data = path.read_bytes()
    dims = b"\x02\x00\x00\x00" + (192).to_bytes(8, "little") + (1).to_bytes(8, "little")
    assert data.count(dims) == 1
    path.write_bytes(data.replace(dims, b"\x01\x00\x00\x00" + (192).to_bytes(8, "little")) + bytes(8))
    with pytest.raises(UnsupportedModel, match=r"'blk\.0\.attn_qkv\.bias' is stored as Q8_0, whose blocks cross"):
        open_gguf(path)


def refusal(path: Path) -> tuple[str | None, int]:
    """Open a file; return the error's text, if it is one of the library's, and the most memory that it took."""
    message = None
    tracemalloc.start()
    try:
        open_gguf(path)
    except JaxinferError as error:
        message = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return message, peak


STRANGE = st.sampled_from(
    [0, 1, 2, 3, 255, 2**31 - 1, 2**31, -1, 0.0, 1e-30, 1e30, float("nan"), True, "", "x", [1, 2]]
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gemma3", "phi2-fused", "phi3-longrope", "gpt2"])
@examples(15, 40)
def test_strange_values_of_any_key_are_read_or_refused_in_one_line(tmp_path, models, name, max_examples):
    path = tmp_path / "m.gguf"
    sound = open_gguf(write_model(path, CASES[name], models[name]))
    prefix = f"{CASES[name].architecture}."
    known = [key for key in dict(sound.gguf_metadata or {}) if key.startswith(prefix)]
    known += [f"{prefix}attention.sliding_window_pattern", f"{prefix}rope.freq_base_swa"]
    made = headers_only(name)["tensors"]
    made |= {tensor: np.ones(6, np.float32) for tensor in PHI3.rope_divisors if name == "phi3-longrope"}
    made |= {"blk.0.attn_qkv.weight": np.ones((192, 64), np.float32)} if name == "phi2-fused" else {}

    @settings(derandomize=True, max_examples=max_examples, deadline=None)
    @given(st.dictionaries(st.sampled_from(known), STRANGE, min_size=1, max_size=2))
    def read(keys):
        write_model(path, CASES[name], models[name], keys=keys, tensors=made)
        message, peak = refusal(path)
        assert message is None or (str(path) in message and "\n" not in message)
        assert peak < 8 * 2**20

    read()
