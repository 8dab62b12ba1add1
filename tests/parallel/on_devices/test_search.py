"""Tree search finds the texts of one device on every kind of mesh."""

import jax
import pytest

from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.errors import InvalidOption
from jaxinfer.parallel.mesh import parse_mesh
from tests.toys import TINY_LLAMA, float32_backend, random_params

PROMPTS = [[1, 70, 80, 90], [1, 5, 6, 7, 8, 9, 10], [3], [200, 100]]
ASKED = {
    "max_new_tokens": 6,
    "sampling": [SamplingParams(), SamplingParams(temperature=0.9, top_p=0.9, seed=5)] * 2,
    "strategy": "mcts:simulations=8,actions=4,depth=3",
}


@pytest.mark.exhaustive
def test_a_mesh_finds_the_texts_of_one_device():
    """They all lie far enough apart; a function as value is refused where there are several devices."""

    def model(mesh=None) -> LanguageModel:
        return LanguageModel(TINY_LLAMA, random_params(TINY_LLAMA), float32_backend(), mesh=mesh)

    expected = [result.tokens for result in model().generate(PROMPTS, **ASKED)]
    for spec in ("tensor=2,data=2", "sequence=2", "pipeline=2"):
        mesh = parse_mesh(spec)
        split = model(mesh.build(jax.devices()[: mesh.num_devices]))
        assert [result.tokens for result in split.generate(PROMPTS, **ASKED)] == expected
        with pytest.raises(InvalidOption, match="a function as value runs on one device"):
            split.generate(PROMPTS, **ASKED, value=lambda candidates: [0.0] * len(candidates))
