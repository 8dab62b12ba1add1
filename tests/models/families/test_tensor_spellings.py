"""Checkpoints of OPT and GPT-2 load under every spelling of their tensor names that was published."""

import re
from typing import Any

import numpy as np
import pytest

import jaxinfer
from jaxinfer.errors import InvalidCheckpoint
from tests.models.dense import dense_logits
from tests.models.tiny_opt import CONFIG, opt_tensors, write_model

TEXT = list(range(5, 17))
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": 60, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32,
    "n_ctx": 32, "bos_token_id": 59, "eos_token_id": 59,
}  # fmt: skip


def gpt2_tensors() -> dict[str, np.ndarray]:
    """Draw the tensors that GPT-2 was published with: no prefix, kernels [in, out], masks saved as buffers."""
    rng = np.random.default_rng(0)
    width = GPT2["n_embd"]
    shapes = {"wte.weight": (60, width), "wpe.weight": (32, width), "ln_f.weight": (width,), "ln_f.bias": (width,)}
    linears = {"attn.c_attn": (1, 3), "attn.c_proj": (1, 1), "mlp.c_fc": (1, 4), "mlp.c_proj": (4, 1)}
    for layer in range(GPT2["n_layer"]):
        for name, (rows, columns) in linears.items():
            shapes[f"h.{layer}.{name}.weight"] = (rows * width, columns * width)
            shapes[f"h.{layer}.{name}.bias"] = (columns * width,)
        for name in ("ln_1", "ln_2"):
            shapes |= {f"h.{layer}.{name}.{kind}": (width,) for kind in ("weight", "bias")}
    tensors = {name: 0.5 * rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for layer in range(GPT2["n_layer"]):
        tensors[f"h.{layer}.attn.bias"] = np.tril(np.ones((1, 1, 32, 32), np.float32))
        tensors[f"h.{layer}.attn.masked_bias"] = np.float32(-1e4) * np.ones((), np.float32)
    return tensors


def prefixed(tensors: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def logits(folder, config, tensors) -> np.ndarray:
    """Load a checkpoint, and compute by definition: how its tensors are spelled changes its parameters or nothing."""
    lm = jaxinfer.load(write_model(folder, config, tensors), dtype="float32", scan_layers=False)
    return dense_logits(lm.config, lm.params, TEXT)


def test_gpt2_loads_with_and_without_prefix_buffers_and_stored_head(tmp_path):
    published = gpt2_tensors()
    expected = logits(tmp_path / "published", GPT2, published)
    assert expected.std() > 0.1
    bare = {name: tensor for name, tensor in published.items() if not re.search(r"\.attn\.(masked_)?bias$", name)}
    saved = {**prefixed(bare, "transformer."), "lm_head.weight": published["wte.weight"]}
    for name, tensors in {"prefix": prefixed(published, "transformer."), "bare": bare, "head": saved}.items():
        np.testing.assert_array_equal(logits(tmp_path / name, GPT2, tensors), expected)


def test_an_untied_head_is_read_beside_names_without_prefix(tmp_path):
    published = gpt2_tensors()
    tied = logits(tmp_path / "tied", GPT2, published)
    untied = {**published, "lm_head.weight": 2 * published["wte.weight"]}
    found = logits(tmp_path / "untied", {**GPT2, "tie_word_embeddings": False}, untied)
    np.testing.assert_allclose(found, 2 * tied, rtol=1e-5, atol=1e-5)


def test_opt_loads_with_and_without_prefix_and_stored_head(tmp_path):
    saved = opt_tensors()
    assert all(name.startswith("model.decoder.") for name in saved)
    expected = logits(tmp_path / "saved", CONFIG, saved)
    bare = {name.removeprefix("model."): tensor for name, tensor in saved.items()}
    with_head = {**bare, "lm_head.weight": saved["model.decoder.embed_tokens.weight"]}
    for name, tensors in {"bare": bare, "head": with_head}.items():
        np.testing.assert_array_equal(logits(tmp_path / name, CONFIG, tensors), expected)


def test_a_mixture_of_spellings_is_refused_by_name(tmp_path):
    tensors = gpt2_tensors()
    tensors["transformer.ln_f.bias"] = tensors.pop("ln_f.bias")
    with pytest.raises(InvalidCheckpoint, match=r"missing tensors transformer\.h\.0\.attn"):
        logits(tmp_path, GPT2, tensors)
