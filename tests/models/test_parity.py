"""Every variant of every family against transformers: logits, greedy tokens, and that each feature matters."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import jaxinfer
from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.models.families.registry import decoder_config
from tests.models.hugging_face import build_model, greedy_tokens, logits_of, save_model
from tests.models.variants import VARIANTS

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

# Beyond the 64 positions or fewer that the stretched variants name as their original length, and short ones beside.
PROMPTS = [np.random.default_rng(length).integers(2, 96, length).tolist() for length in (100, 37, 5)]
TOLERANCE = 1e-4  # of the logits' standard deviation


class Case(NamedTuple):
    name: str
    model: Any
    folder: Path
    expected: list[np.ndarray]
    lm: LanguageModel


@pytest.fixture(scope="module", params=VARIANTS)
def case(request, tmp_path_factory) -> Case:
    variant = VARIANTS[request.param]
    model = build_model(variant)
    folder = save_model(model, tmp_path_factory.mktemp("model"), variant)
    expected = [logits_of(model, ids) for ids in PROMPTS]
    lm = jaxinfer.load(folder, max_len=variant.max_len, scan_layers=False)
    return Case(request.param, model, folder, expected, lm)


def largest_difference(lm: LanguageModel, expected: list[np.ndarray]) -> float:
    """Return the largest difference of logits, in standard deviations of the expected ones."""
    found_BTV = np.asarray(lm.logits(PROMPTS))
    return max(
        float(np.abs(found_TV[: len(expected_TV)] - expected_TV).max() / expected_TV.std())
        for found_TV, expected_TV in zip(found_BTV, expected)
    )


def test_logits_equal_those_of_transformers(case):
    assert min(logits_TV.std() for logits_TV in case.expected) >= 1
    assert largest_difference(case.lm, case.expected) < TOLERANCE


def test_scanned_layers_give_the_logits_and_greedy_tokens_of_transformers(case):
    lm = jaxinfer.load(case.folder, max_len=VARIANTS[case.name].max_len, scan_layers=True)
    assert lm.backend.scan_layers
    assert not case.lm.backend.scan_layers
    assert largest_difference(lm, case.expected) < TOLERANCE
    if case.name == "gqa-dynamic":
        check_greedy(lm, case.model)


# The other yarn variants differ from the one here in their rotary tables alone.
@pytest.mark.parametrize("case", [name for name in VARIANTS if not name.startswith("yarn-")], indirect=True)
def test_greedy_tokens_of_a_ragged_batch_equal_those_of_transformers(case):
    check_greedy(case.lm, case.model)


def check_greedy(lm: LanguageModel, model: Any) -> None:
    results = lm.generate(PROMPTS, max_new_tokens=32, sampling=SamplingParams(min_new_tokens=32))
    assert [list(result.tokens) for result in results] == [greedy_tokens(model, ids, 32) for ids in PROMPTS]


def test_turning_any_feature_off_moves_the_logits(case):
    """By more than a hundred tolerances, so a feature that was ignored would have failed."""
    for feature, edit in VARIANTS[case.name].without.items():
        config, params = edit(case.lm.config, case.lm.params)
        config = replace(config, max_position=160)
        without = LanguageModel(config, params, case.lm.backend)
        assert largest_difference(without, case.expected) > 100 * TOLERANCE, feature


def test_configurations_of_transformers_4_and_5_mean_the_same(case):
    config = json.loads((case.folder / "config.json").read_text())
    older = VARIANTS[case.name].to_version_4(config)
    assert older != config
    assert "rope_parameters" not in older
    assert decoder_config(older) == decoder_config(config) == case.lm.config


@pytest.mark.parametrize(
    ("dtype", "version", "options"),
    [("float32", 4, {"max_shard_size": "20KB"}), ("bfloat16", 5, {}), ("float16", 5, {"max_shard_size": "20KB"})],
)
def test_stored_forms_load_to_the_same_network(dtype, version, options, tmp_path):
    """Sharded and single files, 16-bit and 32-bit, configurations of both versions: all computed in float32."""
    variant = VARIANTS["gqa-tied-attention_bias-linear"]
    model = build_model(variant).to(getattr(torch, dtype))
    folder = save_model(model, tmp_path, variant, version, **options)
    assert (folder / "model.safetensors.index.json").exists() == bool(options)
    expected = [logits_of(model.float(), ids) for ids in PROMPTS]
    assert largest_difference(jaxinfer.load(folder, dtype="float32"), expected) < TOLERANCE
