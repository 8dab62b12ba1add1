"""The meshes and models of these tests, and the same model on one device and on several."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import numpy as np

from jaxinfer import LanguageModel, MeshConfig
from jaxinfer.parallel.mesh import parse_mesh
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
from tests.decoding.strategy_cases import Split
from tests.toys import TINY_LLAMA, float32_backend, random_params

# The meshes of the full product.
SPLIT_HEADS = ("tensor=2", "data=2,tensor=4", "data=2", "tensor=8", "tensor=4", "data=4,tensor=2")
SPLIT_TOKENS = ("sequence=2", "sequence=2,tensor=2", "sequence=4", "data=2,sequence=2,tensor=2")
SPLIT_LAYERS = ("pipeline=2", "pipeline=4", "tensor=2,pipeline=2", "data=2,tensor=2,pipeline=2")
MODELS = ("llama", "gemma2", "opt", "gpt2")


@dataclass(frozen=True)
class Single:
    """A model on one device, with the texts that plain decoding writes there."""

    lm: LanguageModel
    asked: Asked

    def on(self, mesh: str | MeshConfig, microbatches: int | None = None) -> LanguageModel:
        """Return the model on as many of the devices as a mesh has."""
        mesh = parse_mesh(mesh) if isinstance(mesh, str) else mesh
        lm, devices = self.lm, mesh.build(jax.devices()[: mesh.num_devices])
        return LanguageModel(lm.config, lm.params, replace(lm.backend, microbatches=microbatches), mesh=devices)


def make_single(name: str, num_layers: int = 2) -> Single:
    """Make a model with its texts; no prompt is left whose tokens were nearly others."""
    lm = make_model(name, num_layers)
    return Single(lm, ask_clearly(lm, random_prompts(), LIMITS, SAMPLINGS))


def make_model(name: str, num_layers: int = 2) -> LanguageModel:
    """Make a model of a family; llamas have nine heads."""
    return _nine_heads(num_layers) if name == "llama" else random_model(name, num_layers)


def on_split(single: Callable[..., Single], split: Split) -> tuple[Single, LanguageModel]:
    """Return a model, of as many layers as divide over a mesh, on one device and on the mesh."""
    stages, cycle = parse_mesh(split.mesh).pipeline, 2 if split.model == "gemma2" else 1
    one = single(split.model, max(2, stages * cycle))
    return one, one.on(split.mesh, split.microbatches)


def check_logits(lm: LanguageModel, texts, expected) -> None:
    expected, found = np.asarray(expected), np.asarray(lm.logits(texts))
    assert found.shape == expected.shape
    for row, text in enumerate(texts):
        error = np.abs(found[row, : len(text)] - expected[row, : len(text)]).max()
        assert error <= 1e-5 * expected.std()


def sent(hlo: str) -> list[Line]:
    """Return the instructions of a program that send something to other devices."""
    read = (read_line(text) for text in hlo.splitlines() if any(kind in text for kind in COLLECTIVES))
    return [line for line in read if line is not None and collective_kind(line.opcode)]


def check_communication(lm: LanguageModel, split: Split, strategy: str = "") -> None:
    """Devices add up what they have, and gather nothing but the best of each part of a vocabulary.

    Beside that stages hand on what they computed, and a prompt's keys go around a ring; those of layers with a window
    do not, nor what a retrieval cache copies.
    """
    mesh = parse_mesh(split.mesh)
    # Of two layers each part that such a strategy runs is on one stage.
    is_cut = strategy in ("layerskip", "streams") and lm.config.num_layers == 2
    for key, compiled in lm.programs._compiled.items():
        hlo, step = compiled.as_text(), key[0][0]
        kinds = {line.name: collective_kind(line.opcode) for line in sent(hlo)}
        is_ring = mesh.sequence > 1 and step == "prefill" and split.model != "gemma2"
        is_handed_on = mesh.pipeline > 1 and not (is_cut and step == "decode")
        assert not (is_ring or is_handed_on) or "collective-permute" in kinds.values()
        if mesh.sequence > 1 and (step == "prefill" or "triforce" in strategy):
            continue
        allowed = ("all-reduce", "collective-permute") if mesh.pipeline > 1 else ("all-reduce",)
        others = [name for name, kind in kinds.items() if kind not in allowed]
        assert all(is_search(hlo, name) for name in others), others


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
