"""Every registered strategy can be audited on any model, with what is at hand."""

import dataclasses

import pytest

import jaxinfer
from jaxinfer.bench.identity.strategies import check_strategies, make_strategy
from jaxinfer.decoding.registry import STRATEGIES
from jaxinfer.ops.backend import choose_backend
from tests.toys import TINY_LLAMA, float32_backend, random_params


@pytest.mark.slow
def test_every_registered_strategy_can_be_made_for_a_model(tiny_llama_folder):
    model = jaxinfer.load(tiny_llama_folder())
    for name in STRATEGIES:
        strategy = model.resolve(make_strategy(name, model))
        assert strategy.name == name
        assert strategy.exactness in ("identical", "beam", "search")


@pytest.mark.slow
def test_kernels_are_held_to_their_reference_and_a_strategy_that_fails_is_named():
    """A model of one layer has no exit for layerskip."""
    config = dataclasses.replace(TINY_LLAMA, num_layers=1)
    kernels = choose_backend("float32", "cpu", kernels="interpret")
    model = jaxinfer.LanguageModel(config, random_params(config), kernels)
    lines: list[str] = []
    report = check_strategies(model, [[1, 70, 80, 90]], max_new_tokens=4, names=["layerskip"], say=lines.append)
    assert not report["passes"]
    assert [outcome["passes"] for outcome in report["strategies"]] == [True, False]
    assert lines[0].startswith("ok      plain decoding, interpret kernels beside their reference: 1 of 1")
    assert lines[1].startswith(
        "FAILED  layerskip: InvalidOption: layerskip: a model of one layer cannot draft for itself"
    )


@pytest.mark.slow
def test_other_logits_than_the_references_fail(monkeypatch):
    model = jaxinfer.LanguageModel(TINY_LLAMA, random_params(TINY_LLAMA), float32_backend())
    scaled = dataclasses.replace(model.backend, kernels="interpret")
    other = jaxinfer.LanguageModel(dataclasses.replace(TINY_LLAMA, attention_scale=0.1), model.params, scaled)
    monkeypatch.setattr("jaxinfer.bench.identity.strategies.LanguageModel", lambda *_: model)
    report = check_strategies(other, [[1, 70, 80, 90]], max_new_tokens=4, names=[], say=lambda _: None)
    assert not report["passes"]
    assert "logits differ by" in report["strategies"][0]["failure"]
