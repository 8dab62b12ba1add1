"""Real models against tokens and logits that an independent NumPy forward computed, and against transformers."""

import json

import numpy as np
import pytest

import jaxinfer
from tests.default_model import default_model_path
from tests.shared_data import shared_data

pytestmark = pytest.mark.optimised

STORIES = "models/stories260K-hf"
SMOLLM = "models/smollm2-135m-instruct"


@pytest.fixture(scope="module")
def smollm():
    return jaxinfer.load(default_model_path(), dtype="float32", max_len=512, scan_layers=True)


@pytest.fixture(scope="module")
def smollm_cases():
    return json.loads((shared_data(SMOLLM) / "golden_numpy.json").read_text())["cases"]


@pytest.mark.parametrize("scan_layers", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_stories260k_tells_its_golden_story(scan_layers):
    folder = shared_data(STORIES)
    golden = json.loads((folder / "golden_numpy.json").read_text())
    lm = jaxinfer.load(folder, dtype="float32", scan_layers=scan_layers)
    (result,) = lm.generate([golden["prompt_ids"]], max_new_tokens=len(golden["greedy_ids"]))
    assert len(golden["greedy_ids"]) == 200
    assert list(result.tokens) == golden["greedy_ids"]


@pytest.mark.slow
def test_smollm2_writes_its_golden_tokens(smollm, smollm_cases):
    """All prompts in one batch, as text, so that the tokenizer inside the GGUF is held to its golden ids too."""
    assert [smollm.tokenizer.encode(case["prompt"]) for case in smollm_cases] == [
        case["prompt_ids"] for case in smollm_cases
    ]
    results = smollm.generate([case["prompt"] for case in smollm_cases], max_new_tokens=48)
    for result, case in zip(results, smollm_cases):
        assert list(result.tokens) == case["greedy_ids"], case["prompt"]
        assert (result.finish_reason == "stop") == (result.tokens[-1] == 2)
        ended = case["greedy_text"].removesuffix("<|im_end|>")
        assert result.text == ended
    assert {result.finish_reason for result in results} == {"stop", "length"}


@pytest.mark.slow
def test_smollm2_has_its_golden_logits(smollm, smollm_cases):
    logits_BTV = np.asarray(smollm.logits([case["prompt_ids"] for case in smollm_cases]))
    for logits_TV, case in zip(logits_BTV, smollm_cases):
        last_V = logits_TV[len(case["prompt_ids"]) - 1]
        ids, values = zip(*case["first_step_top5"])
        assert np.argsort(-last_V)[:5].tolist() == list(ids)
        np.testing.assert_allclose(last_V[list(ids)], values, atol=2e-3)


@pytest.mark.slow
def test_drafters_come_with_smollm2_and_are_not_named(smollm):
    heads, streams = smollm.resolve("medusa"), smollm.resolve("streams")
    assert heads.max_depth >= 2
    assert streams.max_depth >= 2


@pytest.mark.exhaustive
@pytest.mark.parity
def test_smollm2_equals_transformers_own_reading_of_the_gguf(smollm, smollm_cases):
    """To a thousandth of the logits' deviation, at every position of the prompts and of their golden answers."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path = default_model_path()
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype="float32")
    texts = [case["prompt_ids"] + case["greedy_ids"] for case in smollm_cases]
    found_BTV = np.asarray(smollm.logits(texts))
    for found_TV, ids in zip(found_BTV, texts):
        with torch.no_grad():
            expected_TV = model.eval()(torch.tensor([ids])).logits[0].numpy()
        assert np.abs(found_TV[: len(ids)] - expected_TV).max() < 1e-3 * expected_TV.std()
