"""Every variant of every family against transformers: logits, greedy tokens, and that each feature matters."""

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import jaxinfer
from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.registry import decoder_config
from jaxinfer.notation import Params
from tests.late_imports import late
from tests.models.dense import dense_logits
from tests.models.hugging_face import build_model, greedy_tokens, logits_of, save_model
from tests.models.variants import (
    VARIANTS,
    alibi,
    apertus,
    beside_images,
    cohere_compass,
    falcon,
    gated,
    gpt_relatives,
    later_relatives,
    namesakes,
    nemotron,
)

torch = late("torch")
late("transformers")
pytestmark = pytest.mark.parity

# Beyond the 64 positions or fewer that the stretched variants name as their original length, and short ones beside.
PROMPTS = [np.random.default_rng(length).integers(2, 96, length).tolist() for length in (100, 37, 5)]
TOLERANCE = 1e-4  # of the logits' standard deviation
NEW_TOKENS = 12  # past the length at which the second prompt changes its rotary factors
# Of every family one, of every way to join a block and of every norm; the ropes whose rotation depends on the length.
ORDINARY = (
    "gqa-dynamic",
    "exaone4",
    "gemma-mqa",
    "gemma2",
    "gemma3-vision",
    "arcee",
    "cohere-qk_norm",
    "cohere2",
    "deepseek_v2-groups-yarn",
    "glm4",
    "gpt2-n_inner-untied-scales",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "granite4",
    "mistral-window",
    "olmo3",
    "opt-post_norm-projections",
    "opt-plain-untied-gelu",
    "phi",
    "phi3-gqa-tied-longrope-partial",
    "qwen2-mixed-tied",
    "qwen2_moe-shared-one_dense",
    "qwen3-head_dim-tied",
    "smollm3",
    "stablelm-parallel-qk_norm",
    "starcoder2",
)
# Rings of windows, and a rope whose factors change within the text.
DECODED = ("gemma2", "phi3-gqa-tied-longrope-partial")
# Second variants of families, whose features are for the most part those of others.
SECOND = (
    "cohere-bias-untied",
    "exaone4-no_window-tied",
    "glm",
    "gpt_neox-one_after_the_other",
    "granite-biases",
    "granite4-nope-bias",
    "olmo2-bias-tied",
    "smollm3-window-biases",
    "stablelm",
    "starcoder2-no_bias-untied",
)
MIXTURES = ("qwen2_moe-shared-one_dense", "glm4_moe-groups", "deepseek_v3-bias", "llama4")
# Further families, of which all that is computed is that of others, or has a test of its own in the ordinary run.
THIRD = (
    "mixtral-window",
    "qwen3_moe-every_second",
    "olmoe",
    "granitemoe",
    "granitemoeshared-bias",
    "deepseek_v2-greedy",
    "glm4_moe_lite",
    "llama4-two-bias",
    "phimoe",
    "dots1",
    "ernie4_5_moe",
    "minimax_m2",
    "hunyuan_v1_moe",
    "hunyuan_v1_dense-tied-bias",
    "ministral3",
    *alibi.VARIANTS,
    *apertus.VARIANTS,
    *beside_images.VARIANTS,
    *cohere_compass.VARIANTS,
    *falcon.VARIANTS,
    *gated.VARIANTS,
    *gpt_relatives.VARIANTS,
    *later_relatives.VARIANTS,
    *namesakes.VARIANTS,
    *nemotron.VARIANTS,
)


def tier(name: str, ordinary: bool, left_out: Sequence[str] = ()) -> Any:
    if name in THIRD or name in left_out:
        return pytest.param(name, marks=pytest.mark.exhaustive)
    return name if ordinary else pytest.param(name, marks=pytest.mark.slow)


all_variants = pytest.mark.parametrize("name", [tier(name, name not in (*SECOND, *MIXTURES)) for name in VARIANTS])
some_variants = pytest.mark.parametrize("name", [tier(name, name in ORDINARY, SECOND) for name in VARIANTS])


def tier_of_decoding(name: str) -> Any:
    return pytest.mark.slow if name in DECODED else pytest.mark.exhaustive


class Case(NamedTuple):
    model: Any
    folder: Path
    expected: list[np.ndarray]


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Callable[[str], Case]:
    """Return a function that makes and runs transformers' model of a variant, once."""

    @cache
    def make(name: str) -> Case:
        model = build_model(VARIANTS[name])
        folder = save_model(model, tmp_path_factory.mktemp("model"), VARIANTS[name])
        return Case(model, folder, [logits_of(model, ids) for ids in PROMPTS])

    return make


def load(folder: Path, name: str, scan_layers: bool) -> LanguageModel:
    lm = jaxinfer.load(folder, max_len=VARIANTS[name].max_len, scan_layers=scan_layers)
    assert lm.backend.scan_layers == scan_layers
    return lm


def largest_difference(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Return the largest difference of logits, in standard deviations of the expected ones."""
    return max(
        float(np.abs(found_TV[: len(expected_TV)] - expected_TV).max() / expected_TV.std())
        for found_TV, expected_TV in zip(found, expected)
    )


def check_logits(lm: LanguageModel, expected: list[np.ndarray]) -> None:
    assert largest_difference(np.asarray(lm.logits(PROMPTS)), expected) < TOLERANCE


def check_greedy(lm: LanguageModel, model: Any) -> None:
    """Compare continuations of the ragged batch, past any token that ends a text."""
    sampling = SamplingParams(min_new_tokens=NEW_TOKENS)
    results = lm.generate(PROMPTS, max_new_tokens=NEW_TOKENS, sampling=sampling)
    assert [list(result.tokens) for result in results] == [greedy_tokens(model, ids, NEW_TOKENS) for ids in PROMPTS]


@some_variants
def test_logits_equal_those_of_transformers(case, name):
    _, folder, expected = case(name)
    assert min(logits_TV.std() for logits_TV in expected) >= 1
    check_logits(load(folder, name, scan_layers=False), expected)


@pytest.mark.parametrize("name", [pytest.param(name, marks=tier_of_decoding(name)) for name in VARIANTS])
def test_scanned_layers_give_the_greedy_tokens_of_transformers(case, name):
    model, folder, _ = case(name)
    check_greedy(load(folder, name, scan_layers=True), model)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", VARIANTS)
def test_scanned_layers_give_the_logits_of_transformers(case, name):
    check_logits(load(case(name).folder, name, scan_layers=True), case(name).expected)


# The other yarn variants differ from the one here in their rotary tables alone.
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in VARIANTS if not name.startswith("yarn-")])
def test_single_layers_give_the_greedy_tokens_of_transformers(case, name):
    check_greedy(load(case(name).folder, name, scan_layers=False), case(name).model)


@all_variants
def test_turning_any_feature_off_moves_the_logits(case, name):
    """By more than a hundred tolerances, so a feature that was ignored would have failed.

    What the logits are without it is said by a definition in NumPy, which with it says what transformers does.
    """
    lm = load(case(name).folder, name, scan_layers=False)

    def difference(config: DecoderConfig, params: Params) -> float:
        return largest_difference([dense_logits(config, params, ids) for ids in PROMPTS], case(name).expected)

    params = jax.tree.map(np.asarray, lm.params)
    assert difference(lm.config, params) < TOLERANCE
    for feature, edit in VARIANTS[name].without.items():
        assert difference(*edit(lm.config, params)) > 100 * TOLERANCE, feature


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_saved_loads_as_the_same_model_and_int8_is_close_to_it(case, name, tmp_path):
    lm = load(case(name).folder, name, scan_layers=False)
    lm.save(tmp_path / "saved")
    again = load(tmp_path / "saved", name, scan_layers=False)
    assert again.config == lm.config
    assert jax.tree.all(jax.tree.map(np.array_equal, again.params, lm.params))
    options: dict[str, Any] = {"max_len": VARIANTS[name].max_len, "weights": "int8"}
    narrow = r": its rows of \d+ weights do not divide into groups of 32; use [^\n]*$"
    try:
        rounded = jaxinfer.load(case(name).folder, **options)
    except InvalidOption as refused:
        if re.search(narrow, str(refused)) is None:
            raise
        return
    assert 0 < largest_difference(np.asarray(rounded.logits(PROMPTS)), case(name).expected) < 0.5


@all_variants
def test_configurations_of_transformers_4_and_5_mean_the_same(case, name):
    config = json.loads((case(name).folder / "config.json").read_text())
    older = VARIANTS[name].to_version_4(config)
    assert older != config
    # Version 4 never had these: their first files have the section.
    assert "rope_parameters" not in older or name in cohere_compass.VARIANTS
    assert decoder_config(older) == decoder_config(config)


@pytest.mark.parametrize(
    ("dtype", "version", "options"),
    [
        ("float32", 4, {"max_shard_size": "20KB"}),
        pytest.param("bfloat16", 5, {}, marks=pytest.mark.exhaustive),
        pytest.param("float16", 5, {"max_shard_size": "20KB"}, marks=pytest.mark.slow),
    ],
)
def test_stored_forms_load_to_the_same_network(dtype, version, options, tmp_path):
    """Sharded and single files, 16-bit and 32-bit, configurations of both versions: all computed in float32."""
    variant = VARIANTS["gqa-tied-attention_bias-linear"]
    model = build_model(variant).to(getattr(torch, dtype))
    folder = save_model(model, tmp_path, variant, version, **options)
    assert (folder / "model.safetensors.index.json").exists() == bool(options)
    expected = [logits_of(model.float(), ids) for ids in PROMPTS]
    check_logits(jaxinfer.load(folder, dtype="float32"), expected)
