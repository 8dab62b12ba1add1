"""Published mixtures of experts stay in their file's bits, an expert beside the other, and stand for its numbers."""

import tracemalloc
from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxinfer
from jaxinfer.checkpoint.hf_folder import open_hf_folder
from jaxinfer.checkpoint.leaves import list_leaves
from jaxinfer.checkpoint.matrix_readers import StoredReader
from jaxinfer.checkpoint.published.tensors import PublishedTensors
from jaxinfer.models.decoder import abstract_params
from jaxinfer.models.families.registry import family_of
from jaxinfer.ops.few_bits.quantized_array import is_quantized
from tests.checkpoint.published.cases import CASES
from tests.checkpoint.published.mixtures import CONFIGS, linear, write_mixture
from tests.toys import float32_backend

IDS = [[3, 9, 30, 4, 4, 1, 8, 60]]
NAMES = {
    "mixtral": ("block_sparse_moe.experts", {"gate": "w1", "up": "w3", "down": "w2"}),
    "qwen3_moe": ("mlp.experts", {name: f"{name}_proj" for name in ("gate", "up", "down")}),
    "llama4_text": ("feed_forward.experts", {name: f"{name}_proj" for name in ("gate", "up", "down")}),
}


def stacks(lm, layer: int):
    return lm.params["blocks"][f"layer_{layer}"]["mlp"]["experts"]


def check_numbers(lm, kind: str, plain, *, widened: bool = False) -> None:
    """Check that each expert of each layer stands for its own tensors' numbers."""
    inside, names = NAMES[kind]
    for layer in range(2):
        for ours, theirs in names.items():
            stack = jax.tree.map(np.asarray, stacks(lm, layer)[ours])
            assert is_quantized(stack) != widened
            dense = stack if widened else stack.dequantize()
            for expert, found in enumerate(dense):
                expected = plain[f"model.layers.{layer}.{inside}.{expert}.{theirs}.weight"]
                np.testing.assert_allclose(found, expected, rtol=3e-7, atol=1e-7 * np.abs(expected).max())


SLOW = [("mixtral", "awq")]
REST = [(kind, name) for kind in CONFIGS for name in CASES if (kind, name) not in SLOW]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW),
        *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in REST),
    ],
)
def test_experts_stay_in_their_bits_and_stand_for_the_numbers_of_the_file(tmp_path, kind, name):
    case, said = CASES[name], []
    plain = write_mixture(tmp_path, kind, case.config, linear(case))
    lm = jaxinfer.load(tmp_path / "packed", scan_layers=False, notice=said.append)
    check_numbers(lm, kind, plain, widened=case.widened)
    assert any("widened" in line for line in said) == case.widened


def test_a_router_in_few_bits_is_widened_and_orders_are_the_experts_own(tmp_path):
    """As in Qwen3-30B-A3B-GPTQ-Int4, whose routers were quantized too; here every second matrix has no order."""
    case, count = CASES["gptq_act_order"], iter(range(100))

    def pack(rng, outputs, width):
        return case.pack.func(rng, outputs, width, **{**case.pack.keywords, "act_order": next(count) % 2 == 0})  # pyright: ignore

    said, mixed = [], case._replace(pack=pack)
    plain = write_mixture(tmp_path, "qwen3_moe", case.config, linear(mixed, with_router=True))
    lm = jaxinfer.load(tmp_path / "packed", scan_layers=False, notice=said.append)
    check_numbers(lm, "qwen3_moe", plain)
    assert all(stack.form.is_ordered and stack.order.shape == (8, 1, 128) for stack in stacks(lm, 0).values())
    router = lm.params["blocks"]["layer_1"]["mlp"]["router"]["weights"]
    np.testing.assert_allclose(router, plain["model.layers.1.mlp.gate.weight"], rtol=3e-7, atol=1e-9)
    (line,) = said
    assert line.endswith("matrices of gptq, 4 bits are widened to float32: routers, whose choices need wide scores")
    scanned = jaxinfer.load(tmp_path / "packed", scan_layers=True)
    up = scanned.params["blocks"]["mlp"]["experts"]["up"]
    for layer in range(2):
        one = jax.tree.map(lambda part: part[layer], up)  # noqa: B023
        jax.tree.map(np.testing.assert_array_equal, one, stacks(lm, layer)["up"].by_rows())


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param("qwen3_moe", "gptq_act_order", marks=pytest.mark.exhaustive),
        *(pytest.param("mixtral", name, marks=pytest.mark.exhaustive) for name in ("awq", "compressed_int8", "nf4")),
        *(pytest.param("llama4_text", name, marks=pytest.mark.exhaustive) for name in ("gptq", "compressed_int4")),
    ],
)
def test_logits_are_those_of_the_plain_model(tmp_path, kind, name):
    """In float32, by XLA; the CPU's products round rows to bfloat16, and are as near as that allows."""
    write_mixture(tmp_path, kind, CASES[name].config, linear(CASES[name]))
    lm, plain = (jaxinfer.load(tmp_path / folder) for folder in ("packed", "plain"))
    expected = np.asarray(plain.logits(IDS))
    deviation = expected.std()
    assert deviation > 0.5
    widened = jaxinfer.LanguageModel(lm.config, lm.params, replace(lm.backend, cpu_kernels=False))
    assert np.abs(np.asarray(widened.logits(IDS)) - expected).max() < 1e-4 * deviation
    # Most tokens: where two experts are alike, rounding rows may choose the other.
    assert np.median(np.abs(np.asarray(lm.logits(IDS)) - expected)) < 0.02 * deviation


@pytest.mark.parity
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param("qwen3_moe", "gptq", marks=pytest.mark.exhaustive),
        pytest.param("mixtral", "awq", marks=pytest.mark.exhaustive),
    ],
)
def test_logits_are_those_of_transformers(tmp_path, kind, name):
    """Of the plain folder: it needs other packages for one in few bits."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    from tests.models.hugging_face import logits_of

    write_mixture(tmp_path, kind, CASES[name].config, linear(CASES[name]))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    expected = logits_of(theirs, IDS[0])
    lm = jaxinfer.load(tmp_path / "packed")
    widened = jaxinfer.LanguageModel(lm.config, lm.params, replace(lm.backend, cpu_kernels=False))
    assert np.abs(np.asarray(widened.logits(IDS))[0] - expected).max() < 1e-4 * expected.std()


def test_memory_holds_a_stack_and_a_few_matrices(tmp_path):
    """Of all layers, where these are scanned."""
    case = CASES["gptq"]
    write_mixture(tmp_path, "qwen3_moe", case.config, linear(case))
    checkpoint = open_hf_folder(tmp_path / "packed")
    family = family_of(checkpoint.config)
    config = family.translate(checkpoint.config)
    leaves = list_leaves(abstract_params(config, float32_backend(True)), family.tensor_names(config), None)
    (leaf,) = [leaf for leaf in leaves if leaf.path[-2:] == ("experts", "up")]
    reader = StoredReader(lambda form, width: None)
    found = reader.read(checkpoint, leaf, None)
    assert found is not None
    stored = sum(part.nbytes for part in found.matrix)
    tracemalloc.start()
    reader.read(checkpoint, leaf, None)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A matrix in the making: codes one a byte, twice.
    one = 128 * 128
    assert most < stored + 2 * 4 * one + (64 << 10)


def dynamic(**modules) -> dict:
    return {**CASES["gptq"].config, "dynamic": modules}


def test_modules_may_have_other_bits_or_none(tmp_path):
    """GPTQModel's ``dynamic``: the first pattern that matches counts."""
    wide, narrow = CASES["gptq_8_bits"], CASES["gptq"]

    def choose(name: str):
        if "self_attn" in name or not name.endswith("_proj.weight"):
            return None
        return wide if "down_proj" in name else narrow

    eight = {"bits": 8, "group_size": 64, "sym": False, "desc_act": False}
    method = dynamic(**{r"-:.*\.self_attn": {}, r"+:.*\.down_proj": eight, r".*\.experts\.": {}})
    plain = write_mixture(tmp_path, "qwen3_moe", method, choose)
    source = open_hf_folder(tmp_path / "packed").tensors
    assert isinstance(source, PublishedTensors)
    inside = "model.layers.1.mlp.experts.7"
    for name, bits in (("gate", 4), ("up", 4), ("down", 8)):
        found = source.quantized(f"{inside}.{name}_proj.weight")
        assert (found.form.bits, found.form.group) == (bits, 64 if bits == 8 else None)
        np.testing.assert_allclose(found.dequantize(), plain[f"{inside}.{name}_proj.weight"], rtol=3e-7, atol=1e-7)
    assert "model.layers.0.self_attn.q_proj.weight" not in source.forms()


@pytest.mark.slow
def test_llama_4_taken_apart_is_saved_as_it_came(tmp_path):
    """Its own files have all experts in two tensors, those that were quantized a matrix for each."""
    case = CASES["compressed_int4"]
    plain = write_mixture(tmp_path, "llama4_text", case.config, linear(case))
    lm = jaxinfer.load(tmp_path / "packed", scan_layers=False)
    check_numbers(lm, "llama4_text", plain)
    lm.save(tmp_path / "saved")
    again = jaxinfer.load(tmp_path / "saved", scan_layers=False)
    jax.tree.map(np.testing.assert_array_equal, again.params, lm.params)
    assert again.fingerprint == lm.fingerprint
