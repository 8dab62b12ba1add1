"""Published checkpoints in few bits: the numbers that they stand for, and the logits of the same plain model."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxinfer
from jaxinfer.checkpoint.hf_folder import open_hf_folder
from jaxinfer.ops.cpu_kernels.few_bits.products import has_kernels
from jaxinfer.ops.few_bits.formats import FP8
from jaxinfer.ops.few_bits.quantized_array import is_quantized
from tests.checkpoint.published.cases import CASES
from tests.checkpoint.published.folders import plain_model, write_published
from tests.late_imports import late
from tests.models.hugging_face import logits_of

late("torch")
pytestmark = pytest.mark.parity

IDS = np.random.default_rng(7).integers(1, 96, 24).tolist()
ORDINARY, SLOW = ("gptq_act_order",), ("fp8_blocks", "nf4")
# Of logits: their deviation.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model():
    return plain_model()


def kernels(lm):
    """Return each kernel by the end of its name in Hugging Face's files, with its layer."""
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    names |= {name: f"{name}_proj" for name in ("gate", "up", "down")}
    blocks = lm.params["blocks"]
    return {
        f"model.layers.{layer}.{'self_attn' if part == 'attention' else 'mlp'}.{names[name]}.weight": linear["kernel"]
        for layer in range(2)
        for part in ("attention", "mlp")
        for name, linear in blocks[f"layer_{layer}"][part].items()
    }


def has_no_products(name):
    """Whether a case is widened: levels that are not even are looked up, for which some processors have nothing."""
    return CASES[name].widened or (any(each in name for each in ("fp8", "fp4", "nf4")) and not has_kernels(FP8))


@pytest.mark.parametrize("name", CASES)
def test_kernels_stand_for_the_numbers_of_the_file(tmp_path, model, name):
    """In few bits where these have products, else widened, and said so."""
    case, said = CASES[name], []
    is_widened = has_no_products(name)
    expected = write_published(tmp_path, case, model)
    lm = jaxinfer.load(tmp_path, notice=said.append)
    found, plain = kernels(lm), open_hf_folder(tmp_path).tensors
    assert found.keys() == expected.keys()
    for key, weights in expected.items():
        kernel = found[key]
        assert is_quantized(kernel) != is_widened
        dense = jax.tree.map(np.asarray, kernel)
        dense = dense.dequantize() if is_quantized(kernel) else dense
        for numbers in (dense, plain.read(key, np.dtype(np.float32))):
            np.testing.assert_allclose(numbers, weights, rtol=3e-7, atol=1e-7 * np.abs(weights).max())
    assert any("widened" in line for line in said) == is_widened


def marks(name):
    return () if name in ORDINARY else pytest.mark.slow if name in SLOW else pytest.mark.exhaustive


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in CASES])
def test_logits_are_those_of_the_plain_model(tmp_path, model, name):
    """In float32, by XLA; the CPU's products round their inputs to bfloat16, and are as near as that allows."""
    write_published(tmp_path, CASES[name], model)
    expected = logits_of(model, IDS)
    deviation = expected.std()
    assert deviation > 0.5
    lm = jaxinfer.load(tmp_path)
    # Plain kernels lie as the backend that they were loaded for has them.
    backend = lm.backend if has_no_products(name) else replace(lm.backend, cpu_kernels=False)
    widened = jaxinfer.LanguageModel(lm.config, lm.params, backend)
    assert np.abs(np.asarray(widened.logits([IDS]))[0] - expected).max() < TOLERANCE * deviation
    assert (np.asarray(lm.logits([IDS]))[0] - expected).std() < 0.02 * deviation


@pytest.mark.slow
def test_floats_in_blocks_are_what_transformers_makes_of_them(tmp_path, model):
    """Of the formats, this one transformers widens without other packages."""
    import torch
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    write_published(tmp_path, CASES["fp8_blocks"], model)
    how = FineGrainedFP8Config(weight_block_size=(128, 128), dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=how, dtype=torch.float32)
    lm = jaxinfer.load(tmp_path)
    for name, kernel in kernels(lm).items():
        expected = theirs.get_parameter(name).detach().numpy()
        found = jax.tree.map(np.asarray, kernel)
        np.testing.assert_array_equal(found.dequantize() if is_quantized(found) else found, expected)
    deviation = logits_of(theirs, IDS).std()
    assert (np.asarray(lm.logits([IDS]))[0] - logits_of(theirs, IDS)).std() < 0.02 * deviation
