"""The meshes and models of these tests, and the same model on one device and on several."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import jax

from jaxinfer import LanguageModel, MeshConfig
from tests.decoding.covered_models import (
    LIMITS,
    SAMPLINGS,
    VOCAB_SIZE,
    Asked,
    ask_clearly,
    damp_last_layer,
    quick_compilation,
    random_model,
    random_prompts,
)
from tests.toys import TINY_LLAMA, float32_backend, random_params

MESHES: Mapping[str, MeshConfig] = MappingProxyType(
    {
        str(mesh): mesh
        for mesh in (
            MeshConfig(tensor=2),
            MeshConfig(data=2, tensor=4),
            MeshConfig(data=2),
            MeshConfig(tensor=8),
            MeshConfig(tensor=4),
            MeshConfig(data=4, tensor=2),
        )
    }
)
MODELS = ("llama", "gemma2", "opt", "gpt2")


@dataclass(frozen=True)
class Single:
    """A model on one device, with the texts that plain decoding writes there."""

    lm: LanguageModel
    asked: Asked

    def on(self, mesh: MeshConfig) -> LanguageModel:
        """Return the model on as many of the eight devices as a mesh has."""
        assert jax.device_count() == 8
        lm = self.lm
        return LanguageModel(lm.config, lm.params, lm.backend, mesh=mesh.build(jax.devices()[: mesh.num_devices]))


def make_single(name: str) -> Single:
    """Make a model with its texts; no prompt is left whose tokens were nearly others."""
    with quick_compilation():
        lm = _nine_heads() if name == "llama" else random_model(name)
        return Single(lm, ask_clearly(lm, random_prompts(), LIMITS, SAMPLINGS))


def _nine_heads() -> LanguageModel:
    """Return a llama with the heads of SmolLM2-135M, and features that no even number divides."""
    config = replace(TINY_LLAMA, vocab_size=VOCAB_SIZE, num_heads=9, num_kv_heads=3, ffn_dim=63, max_position=256)
    params = damp_last_layer(config, random_params(config, seed=3), 0.3)
    return LanguageModel(config, params, float32_backend())
