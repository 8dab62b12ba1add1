"""Gates, bounds and norms inside attention and feed-forward parts, and sinusoids, are as the definition has them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxinfer import LanguageModel
from jaxinfer.errors import InvalidOption
from jaxinfer.models.adapters import kernel_axes
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.family import Part
from jaxinfer.models.padding import pad_config
from tests.models.dense import dense_logits
from tests.toys import TINY_LLAMA, float32_backend, random_params

CONFIG: DecoderConfig = replace(
    TINY_LLAMA,
    num_layers=1,
    norm="layer",
    qk_norm="biased_head",
    clip_qkv=0.8,
    attention_gate=True,
    inner_norms=True,
    sinusoids=2,
)
PROMPTS = [np.random.default_rng(length).integers(2, 258, length).tolist() for length in (29, 5)]
WITHOUT: dict[str, Any] = {
    "clip_qkv": None,
    "attention_gate": False,
    "inner_norms": False,
    "sinusoids": None,
    "qk_norm": None,
}


def largest_difference(found_TV: np.ndarray, expected_TV: np.ndarray) -> float:
    return float(np.abs(found_TV[: len(expected_TV)] - expected_TV).max() / expected_TV.std())


def test_logits_are_the_definitions_and_each_feature_moves_them():
    rng, params = np.random.default_rng(1), random_params(CONFIG)
    attention = params["blocks"]["layer_0"]["attention"]
    for name in ("query_norm", "key_norm"):
        attention[name]["bias"] = rng.normal(size=CONFIG.head_dim).astype(np.float32)
    logits_BTV = np.asarray(LanguageModel(CONFIG, params, float32_backend(), max_len=64).logits(PROMPTS))
    for row, ids in enumerate(PROMPTS):
        assert largest_difference(logits_BTV[row], dense_logits(CONFIG, params, ids)) < 1e-4
    for name, value in WITHOUT.items():
        other = dense_logits(replace(CONFIG, **{name: value}), params, PROMPTS[0])
        assert largest_difference(logits_BTV[0], other) > 1e-2, name


def test_what_a_mesh_or_a_text_without_end_would_change_is_refused():
    assert pad_config(replace(CONFIG, ffn_dim=64), 2).ffn_dim == 64
    with pytest.raises(InvalidOption, match=r"mesh: \d+ heads and 66 feed-forward features, .* over tensor=4"):
        pad_config(replace(CONFIG, ffn_dim=66), 4)
    with pytest.raises(InvalidOption, match=r"cache streaming: .*\(sinusoids\)"):
        LanguageModel(CONFIG, random_params(CONFIG), float32_backend(), cache="streaming:sinks=4,window=16")


def test_adapters_may_change_a_gate_where_there_is_one():
    assert kernel_axes(CONFIG)["attention.gate"] == ("heads", "embed")
    assert "attention.gate" not in kernel_axes(TINY_LLAMA)


def test_heads_that_turn_backwards_have_their_halves_exchanged():
    """A rotation of (x, y) by minus an angle is that of (y, x) by the angle, exchanged."""
    rows = Part("", rotary=(8, 4), backwards=True).rows(16)
    assert rows.tolist() == [2, 3, 0, 1, 4, 5, 6, 7, 10, 11, 8, 9, 12, 13, 14, 15]
