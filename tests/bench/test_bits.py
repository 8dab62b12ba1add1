"""The comparison of bits says which strategies share plain decoding's, and fails where one must and does not."""

import dataclasses

import numpy as np
import pytest

import jaxinfer
from jaxinfer.bench.identity.bits import compare_bits, keeps_plain_bits
from jaxinfer.bench.identity.strategies import make_strategy
from jaxinfer.decoding.registry import parse_strategy
from jaxinfer.ops.backend import choose_backend
from tests.toys import encode_bytes

PROMPTS = [encode_bytes("The quick fox, the quick fox, the"), encode_bytes("Once upon")]


@pytest.fixture(scope="module")
def model(tiny_llama_folder):
    return jaxinfer.load(tiny_llama_folder(num_layers=1))


@pytest.mark.exhaustive
def test_on_a_cpu_every_comparison_is_promised_and_equal(model):
    lines: list[str] = []
    report = compare_bits(model, PROMPTS, max_new_tokens=6, names=("prompt_lookup",), say=lines.append)
    assert report["passes"]
    assert [(one["company"], one["is_promised"]) for one in report["bits"]] == [
        ("in a batch of 2 beside alone", True),
        ("alone in a longer cache", True),
        ("alone", True),
        ("in a batch of 2", True),
    ]
    assert all(one["tokens"] == one["tokens_equal"] == one["bits_equal"] > 0 for one in report["bits"])
    assert lines[-1].startswith("equal   prompt_lookup, in a batch of 2: ")


@pytest.mark.parametrize(
    "is_promised", [pytest.param(True, marks=pytest.mark.slow), pytest.param(False, marks=pytest.mark.exhaustive)]
)
def test_a_bit_that_differs_is_named_and_fails_if_it_is_promised(model, monkeypatch, is_promised):
    """One log-probability of a batch is made the next larger number."""
    generate = model.generate

    def changed(prompts, *, batch_size, **options):
        results = generate(prompts, batch_size=batch_size, **options)
        if batch_size == 1:
            return results
        values = list(results[1].logprobs)
        values[3] = float(np.nextafter(np.float32(values[3]), np.float32(0)))
        return [results[0], dataclasses.replace(results[1], logprobs=tuple(values))]

    monkeypatch.setattr(model, "generate", changed)
    if not is_promised:
        monkeypatch.setattr(type(model.backend), "keeps_bits", False)
    lines: list[str] = []
    report = compare_bits(model, PROMPTS, max_new_tokens=6, names=(), say=lines.append)
    assert report["passes"] != is_promised
    (found,) = [one for one in report["bits"] if one["bits_equal"] < one["tokens"]]
    assert found["tokens_equal"] == found["tokens"] == found["bits_equal"] + 2
    assert found["first"] == (1, 3)
    assert 0 < found["largest_difference"] < 1e-6
    assert lines[0].startswith(("FAILED " if is_promised else "differs") + " autoregressive, in a batch of 2")


def test_chains_of_the_size_of_a_step_are_promised(tiny_llama_folder):
    model = jaxinfer.load(tiny_llama_folder(), scan_layers=True, exact="bits")
    for name, is_promised in (("jacobi", True), ("medusa", False)):
        assert keeps_plain_bits(model.resolve(make_strategy(name, model)), model) == is_promised
    assert not keeps_plain_bits(parse_strategy("prompt_lookup:num_draft_tokens=16"), model)
    margin = choose_backend("float32", "cpu", scan_layers=True)
    other = jaxinfer.LanguageModel(model.config, model.params, margin)
    assert not keeps_plain_bits(parse_strategy("jacobi"), other)
