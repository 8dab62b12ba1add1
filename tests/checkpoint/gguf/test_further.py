"""GGUF files of further architectures hold the parameters and the configuration that the Hugging Face folder does."""

import gguf
import jax
import numpy as np
import pytest

import jaxinfer
from jaxinfer.checkpoint.gguf.architectures.refused import WHAT
from jaxinfer.checkpoint.gguf.architectures.registry import ARCHITECTURES
from jaxinfer.checkpoint.gguf.file import GGUFTensors, open_gguf
from jaxinfer.errors import InvalidCheckpoint, UnsupportedModel
from jaxinfer.models.families.registry import decoder_config
from tests.checkpoint.gguf import further
from tests.checkpoint.gguf.files import write_gguf
from tests.checkpoint.gguf.further import CASES, write

# Each of these undoes something that no other does; the others are rows of data beside them.
ORDINARY = ("falcon in groups", "apertus", "glm4_moe")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ORDINARY else pytest.mark.exhaustive) for name in CASES],
)
def test_parameters_and_configuration_are_those_of_the_folder(tmp_path, name):
    """So that logits are the same in every bit."""
    path, config, params = write(tmp_path / "model.gguf", name)
    lm = jaxinfer.load(path, dtype="float32", scan_layers=False)
    assert lm.config == config
    found, expected = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (lm.params, params))
    assert found.keys() == expected.keys()
    for name, values in found.items():
        np.testing.assert_array_equal(np.asarray(values), expected[name], err_msg=str(name))


@pytest.mark.parametrize(
    "name",
    [
        *("exaone_moe", "afmoe", "dbrx", "ministral3", "mistral as mistral3"),
        *("bitnet", "bitnet beside scales", "minicpm3", "qwen2 as qwen", "glm as chatglm", "granite as minicpm"),
    ],
)
def test_a_configuration_is_the_folders(tmp_path, name):
    path, config, _ = write(tmp_path / "model.gguf", name)
    assert decoder_config(open_gguf(path).config) == config


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("bitnet", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
        ("minicpm3", {"attention.head_count_kv": 2}, "head_count_kv = 2"),
        ("qwen2 as qwen", {"feed_forward_length": 47}, "feed_forward_length = 47"),
        pytest.param("llama as baichuan", {"block_count": 40}, "block_count = 40", marks=pytest.mark.slow),
        pytest.param("minicpm3", {"rope.dimension_count": 10}, "key_length = 10", marks=pytest.mark.slow),
        ("dbrx", {"attention.layer_norm_epsilon": 1e-6}, "layer_norm_epsilon = "),
        ("ministral3", {"rope.scaling.type": "linear"}, "temperature_scale = 0.125"),
        pytest.param("afmoe", {"expert_gating_func": 1}, "expert_gating_func = 1", marks=pytest.mark.slow),
        ("olmo", {"attention.layer_norm_epsilon": 1e-6}, "layer_norm_epsilon = "),
        ("nemotron", dict.fromkeys(("attention.key_length", "attention.value_length"), 12), "key_length = 12"),
        ("falcon in groups", {"attention.head_count_kv": 1}, "head_count_kv = 1"),
        pytest.param("gpt_bigcode", {"attention.head_count_kv": 4}, "head_count_kv = 4", marks=pytest.mark.slow),
        ("granitemoehybrid", {"attention.head_count_kv": [2, 0]}, "head_count_kv = .2, 0."),
        ("granitemoehybrid", {"attention.head_count_kv": [2]}, "head_count_kv = .2."),
        pytest.param(
            "granitemoehybrid saved as granite",
            {"rope.scaling.finetuned": False},
            "rope.scaling.finetuned = False",
            marks=pytest.mark.slow,
        ),
        ("exaone4", {"attention.sliding_window_pattern": [True]}, "sliding_window_pattern = .True."),
        ("glm4_moe", {"nextn_predict_layers": 4}, "nextn_predict_layers = 4"),
        pytest.param("dots1", {"expert_gating_func": 1}, "expert_gating_func = 1", marks=pytest.mark.slow),
        pytest.param(
            "hunyuan_v1_moe",
            {"expert_shared_feed_forward_length": 12},
            "expert_shared_feed_forward_length = 12",
            marks=pytest.mark.slow,
        ),
        pytest.param("llama4_text", {"attention.sliding_window": 0}, "sliding_window = 0", marks=pytest.mark.slow),
        pytest.param("bloom", {"feed_forward_length": 64}, "feed_forward_length = 64", marks=pytest.mark.slow),
        ("mpt", {"attention.max_alibi_bias": 0.0}, "max_alibi_bias = 0.0"),
        pytest.param("phimoe", {"rope.dimension_count": 4}, "rope.dimension_count = 4", marks=pytest.mark.slow),
    ],
)
def test_what_no_model_has_is_refused_by_name(tmp_path, name, changes, named):
    path, *_ = write(tmp_path / "model.gguf", name, changes)
    with pytest.raises(UnsupportedModel, match=named) as error:
        decoder_config(open_gguf(path).config)
    assert "\n" not in str(error.value)


def test_factors_that_the_first_files_of_minicpm_do_not_have_are_those_of_its_2b(tmp_path):
    changes = {"embedding_scale": None, "residual_scale": None, "logit_scale": None}
    path, *_ = write(tmp_path / "model.gguf", "granite as minicpm", changes)
    config = decoder_config(open_gguf(path).config)
    found = config.embedding_scale, config.residual_scale, config.logit_scale
    assert found == (12.0, pytest.approx(1.4 / 2**0.5), 256 / 32)


@pytest.mark.parametrize("name", ["grok", "openelm", "gptj"])
def test_an_architecture_that_is_not_supported_is_refused_with_what_it_is(tmp_path, name):
    path = write_gguf(tmp_path / "model.gguf", {}, architecture=name)
    with pytest.raises(UnsupportedModel, match=f"'{name}' is not supported: it is a ") as error:
        open_gguf(path)
    assert "\n" not in str(error.value)


def test_refused_architectures_are_known_by_llama_cpp_and_not_here():
    assert set(gguf.MODEL_ARCH_NAMES.values()) >= WHAT.keys()
    assert not WHAT.keys() & ARCHITECTURES.keys()


def test_a_number_beside_a_matrix_multiplies_it(tmp_path):
    """Of each matrix its own, by a power of two, which rounds nothing."""
    path, _, params = write(tmp_path / "model.gguf", "bitnet beside scales")
    tensors = open_gguf(path).tensors
    for layer, block in enumerate(params["blocks"].values()):
        for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("output", "o_proj")):
            name = f"model.layers.{layer}.self_attn.{theirs}.weight"
            np.testing.assert_array_equal(tensors.read(name, np.dtype(np.float32)), block["attention"][ours]["kernel"])
    assert isinstance(tensors, GGUFTensors)
    assert tensors.stored_dtype("model.layers.0.self_attn.q_proj.weight") == np.float32


@pytest.mark.parametrize(
    ("tensor", "values", "message"),
    [
        ("blk.0.attn_q.scale", [1.0, 2.0], "must be one number"),
        ("blk.0.attn_q.scale", [float("nan")], "must be one number"),
        ("blk.2.attn_q.scale", [1.0], "'blk.2.attn_q.weight' is missing beside its scale"),
    ],
)
def test_a_scale_that_is_no_number_of_a_matrix_is_damage(tmp_path, monkeypatch, tensor, values, message):
    made = further.gguf_tensors
    monkeypatch.setattr(further, "gguf_tensors", lambda *given: made(*given) | {tensor: np.array(values, np.float32)})
    path, *_ = write(tmp_path / "model.gguf", "bitnet beside scales")
    with pytest.raises(InvalidCheckpoint, match=message) as error:
        open_gguf(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("bound", "found"), [(8.0, 8.0), (0.0, None), (None, None)])
def test_bounds_of_queries_keys_and_values_are_those_of_the_file(tmp_path, bound, found):
    for name in ("olmo", "mpt"):
        path, *_ = write(tmp_path / f"{name}.gguf", name, {"attention.clamp_kqv": bound})
        assert decoder_config(open_gguf(path).config).clip_qkv == found


def test_slopes_of_heads_that_are_no_power_of_two_are_those_of_the_file(tmp_path):
    """Of six heads: as llama.cpp's, every head past the fourth has a step between those of four."""
    changes = {"attention.head_count": 6, "embedding_length": 48, "feed_forward_length": 192}
    path, *_ = write(tmp_path / "model.gguf", "mpt", changes)
    config = decoder_config(open_gguf(path).config)
    assert config.alibi is not None
    first, rest = 2.0 ** (-16 / 4), 2.0 ** (-16 / 8)
    assert config.alibi.slopes == (first, first**2, first**3, first**4, rest, rest**3)


@pytest.mark.parametrize(
    ("length", "factor", "found"),
    [
        (131072, 1.1902380714238083, 1.243163121016122),
        (131072, None, 1.243163121016122),
        (131072, 1.1, 1.1),
        (65536, 1.1, 1.1),
    ],
)
def test_a_stated_factor_of_the_rotation_is_kept_unless_the_converter_derived_it(tmp_path, length, factor, found):
    path, *_ = write(tmp_path / "model.gguf", "phimoe", {"context_length": length, "rope.scaling.attn_factor": factor})
    (kind,) = decoder_config(open_gguf(path).config).layer_pattern
    assert kind.rope is not None
    assert kind.rope.scaling is not None
    assert kind.rope.scaling.attention_factor == pytest.approx(found, rel=1e-6)


@pytest.mark.parametrize("numbers", [[0.5], [0.5, float("nan")], ["a", "b"], None])
def test_activations_without_a_number_for_each_layer_are_damage(tmp_path, monkeypatch, numbers):
    add = gguf.GGUFWriter.add_array
    changed = {"xielu.beta": numbers}
    monkeypatch.setattr(
        gguf.GGUFWriter,
        "add_array",
        lambda self, key, values: (
            None if changed.get(key, values) is None else add(self, key, changed.get(key, values))
        ),
    )
    path, *_ = write(tmp_path / "model.gguf", "apertus")
    with pytest.raises(InvalidCheckpoint, match=r"xielu\.beta must hold 2 numbers"):
        open_gguf(path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["falcon in groups", "gpt_neox"])
def test_blocks_of_fused_rows_are_multiplied_as_they_lie(tmp_path, name):
    """In Hugging Face's order, in which the file does not have them."""
    path, *_ = write(tmp_path / "model.gguf", name, kind="Q8_0")
    lm, plain = jaxinfer.load(path, weights="gguf"), jaxinfer.load(path)
    ids = [[3, 9, 30, 4, 4, 1]]
    found, expected = (np.asarray(each.logits(ids)) for each in (lm, plain))
    assert 0 < np.abs(found - expected).max() < 0.03 * expected.std()
