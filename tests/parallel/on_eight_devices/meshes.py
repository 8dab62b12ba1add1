"""The meshes and models of these tests, and the same model on one device and on several."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import jax

from jaxinfer import LanguageModel, MeshConfig
from jaxinfer.planning.hlo.collectives import COLLECTIVES, collective_kind
from jaxinfer.planning.hlo.text import Line, read_line
from tests.decoding.covered_models import (
    LIMITS,
    SAMPLINGS,
    VOCAB_SIZE,
    Asked,
    ask_clearly,
    damp_last_layer,
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

    def on(self, mesh: MeshConfig, microbatches: int | None = None) -> LanguageModel:
        """Return the model on as many of the eight devices as a mesh has."""
        assert jax.device_count() == 8
        lm, devices = self.lm, mesh.build(jax.devices()[: mesh.num_devices])
        return LanguageModel(lm.config, lm.params, replace(lm.backend, microbatches=microbatches), mesh=devices)


def make_single(name: str, num_layers: int = 2) -> Single:
    """Make a model with its texts; no prompt is left whose tokens were nearly others."""
    lm = _nine_heads(num_layers) if name == "llama" else random_model(name, num_layers)
    return Single(lm, ask_clearly(lm, random_prompts(), LIMITS, SAMPLINGS))


def sent(hlo: str) -> list[Line]:
    """Return the instructions of a program that send something to other devices."""
    read = (read_line(text) for text in hlo.splitlines() if any(kind in text for kind in COLLECTIVES))
    return [line for line in read if line is not None and collective_kind(line.opcode)]


def is_search(hlo: str, name: str) -> bool:
    """Tell whether an instruction is one that `jaxinfer.ops.top_k` asks for itself."""
    found = re.search(rf"%{re.escape(name)} = .*op_name=\"([^\"]*)\"", hlo)
    return found is not None and found[1].endswith("shard_map/all_gather")


def _nine_heads(num_layers: int) -> LanguageModel:
    """Return a llama with the heads of SmolLM2-135M, and features that no even number divides."""
    heads = {"num_heads": 9, "num_kv_heads": 3}
    config = replace(TINY_LLAMA, vocab_size=VOCAB_SIZE, num_layers=num_layers, ffn_dim=63, max_position=256, **heads)
    params = damp_last_layer(config, random_params(config, seed=3), 0.3)
    return LanguageModel(config, params, float32_backend())
