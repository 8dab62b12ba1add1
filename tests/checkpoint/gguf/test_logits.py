"""A GGUF file of every architecture computes what the Hugging Face model it was made of computes."""

import numpy as np
import pytest

import jaxinfer
from tests.checkpoint.gguf.architectures import CASES, build_model, write_model
from tests.late_imports import late
from tests.models.dense import dense_logits

torch = late("torch")
late("transformers")
pytestmark = pytest.mark.parity

# Past the windows of 24 tokens and the original lengths of 40, and short of both.
PROMPTS = [np.random.default_rng(length).integers(3, 96, length).tolist() for length in (100, 30, 5)]
TOLERANCE = 1e-4  # of the logits' standard deviation


# Of the others too the tensors and the configuration are held to transformers' own, in test_architectures.
ORDINARY = ("llama", "gemma3")
SLOW, EXHAUSTIVE = pytest.mark.slow, pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("name", "is_compiled"),
    [
        *(
            pytest.param(name, False, marks=() if name in ORDINARY else EXHAUSTIVE if at % 3 else SLOW)
            for at, name in enumerate(CASES)
        ),
        *(pytest.param(name, True, marks=SLOW if name in ORDINARY else EXHAUSTIVE) for name in CASES),
    ],
)
def test_logits_equal_those_of_the_model_in_the_file(tmp_path, name, is_compiled):
    """Those that the loaded parameters have by definition, and those that the decoder computes of them."""
    model = build_model(CASES[name])
    path = write_model(tmp_path / "m.gguf", CASES[name], model, fused=name.endswith("fused"))
    lm = jaxinfer.load(path, dtype="float32", scan_layers=False)
    if is_compiled:
        found = list(np.asarray(lm.logits(PROMPTS)))
    else:
        found = [dense_logits(lm.config, lm.params, ids) for ids in PROMPTS]
    for ids, found_TV in zip(PROMPTS, found):
        with torch.no_grad():
            expected_TV = model(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).logits[0].numpy()
        assert expected_TV.std() >= 1
        assert np.abs(found_TV[: len(ids)] - expected_TV).max() < TOLERANCE * expected_TV.std()
