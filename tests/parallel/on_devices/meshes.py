"""The meshes and models of these tests, and the same model on one device and on several."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jaxinfer import LanguageModel, MeshConfig
from jaxinfer.ops.backend import choose_backend
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
from tests.decoding.identity import keeps_bits
from tests.decoding.strategy_cases import Split
from tests.toys import TINY_LLAMA, random_params

# The meshes of the full product.
SPLIT_HEADS = ("tensor=2", "data=2,tensor=4", "data=2", "tensor=8", "tensor=4", "data=4,tensor=2")
SPLIT_TOKENS = ("sequence=2", "sequence=2,tensor=2", "sequence=4", "data=2,sequence=2,tensor=2")
SPLIT_LAYERS = ("pipeline=2", "pipeline=4", "tensor=2,pipeline=2", "data=2,tensor=2,pipeline=2")
MODELS = ("llama", "gemma2", "opt", "gpt2")


@dataclass(frozen=True)
class Single:
    """A model on one device."""

    lm: LanguageModel

    @cached_property
    def asked(self) -> Asked:
        """The texts that plain decoding writes there; no prompt is left whose tokens were nearly others."""
        return ask_clearly(self.lm, random_prompts(), LIMITS, SAMPLINGS)

    def on(self, mesh: str | MeshConfig, microbatches: int | None = None, **changes: Any) -> LanguageModel:
        """Return the model on as many of the devices as a mesh has; ``changes`` are of its backend."""
        return on_mesh(self.lm, mesh, microbatches=microbatches, **changes)


def on_mesh(lm: LanguageModel, mesh: str | MeshConfig, **changes: Any) -> LanguageModel:
    """Return a model on as many of the devices as a mesh has; ``changes`` are of its backend."""
    mesh = parse_mesh(mesh) if isinstance(mesh, str) else mesh
    devices = mesh.build(jax.devices()[: mesh.num_devices])
    return LanguageModel(lm.config, lm.params, replace(lm.backend, **changes), mesh=devices)


def make_single(name: str, num_layers: int = 2) -> Single:
    """Make a model whose texts are written when they are asked for."""
    return Single(make_model(name, num_layers))


def make_model(name: str, num_layers: int = 2, dtype: str = "float32") -> LanguageModel:
    """Make a model of a family; llamas have nine heads."""
    return _nine_heads(num_layers, dtype) if name == "llama" else random_model(name, num_layers, dtype)


def on_split(single: Callable[..., Single], split: Split, **changes: Any) -> tuple[Single, LanguageModel]:
    """Return a model, of as many layers as divide over a mesh, on one device and, with changes, on the mesh."""
    stages, cycle = parse_mesh(split.mesh).pipeline, 2 if split.model == "gemma2" else 1
    one = single(split.model, max(2, stages * cycle))
    return one, one.on(split.mesh, split.microbatches, **changes)


def check_logits(lm: LanguageModel, texts, expected) -> None:
    """Check that the logits of texts are those of one device, in every bit if the mesh keeps them."""
    expected, found = np.asarray(expected), np.asarray(lm.logits(texts))
    assert found.shape == expected.shape
    for row, text in enumerate(texts):
        error = np.abs(found[row, : len(text)] - expected[row, : len(text)]).max()
        assert error <= (0 if keeps_bits(lm) else 1e-5 * expected.std())


def sent(hlo: str) -> list[Line]:
    """Return the instructions of a program that send something to other devices."""
    read = (read_line(text) for text in hlo.splitlines() if any(kind in text for kind in COLLECTIVES))
    return [line for line in read if line is not None and collective_kind(line.opcode)]


def check_communication(lm: LanguageModel, split: Split, strategy: str = "") -> None:
    """Devices add up what they have, and gather nothing but what the library itself gathers.

    Beside that stages hand on what they computed, and a prompt's keys go around a ring without our CPU kernels; those
    of layers with a window do not, nor what a retrieval cache copies.
    """
    mesh = parse_mesh(split.mesh)
    # Of two layers each part that such a strategy runs is on one stage.
    is_cut = strategy in ("layerskip", "streams") and lm.config.num_layers == 2
    # What reads features runs prompts in such parts too.
    is_parted = strategy == "dflash" and lm.config.num_layers == 2
    goes_around = mesh.sequence > 1 and split.model != "gemma2" and not lm.programs.decoder.backend.keeps_bits
    for key, compiled in lm.programs.live.items():
        hlo, step = compiled.as_text(), key[0][0]
        kinds = {line.name: collective_kind(line.opcode) for line in sent(hlo)}
        is_ring = goes_around and step == "prefill"
        is_handed_on = mesh.pipeline > 1 and not is_parted and not (is_cut and step == "decode")
        assert not (is_ring or is_handed_on) or "collective-permute" in kinds.values()
        if mesh.sequence > 1 and (step == "prefill" or "triforce" in strategy):
            continue
        allowed = ("all-reduce", "collective-permute") if mesh.pipeline > 1 else ("all-reduce",)
        others = [name for name, kind in kinds.items() if kind not in allowed]
        assert all(is_asked_for(hlo, name) for name in others), others


def is_asked_for(hlo: str, name: str) -> bool:
    """Tell whether the library asks for a gather itself: a search for the best, parts of sums, slots, a vocabulary."""
    found = re.search(rf"%{re.escape(name)} = .*op_name=\"([^\"]*)\"", hlo)
    return found is not None and found[1].endswith("shard_map/all_gather")


def _nine_heads(num_layers: int, dtype: str) -> LanguageModel:
    """Return a llama with the heads of SmolLM2-135M, and features that no even number divides."""
    heads = {"num_heads": 9, "num_kv_heads": 3}
    config = replace(TINY_LLAMA, vocab_size=VOCAB_SIZE, num_layers=num_layers, ffn_dim=63, max_position=256, **heads)
    params = damp_last_layer(config, random_params(config, seed=3), 0.3)
    return LanguageModel(config, jax.tree.map(lambda leaf: leaf.astype(dtype), params), choose_backend(dtype, "cpu"))
