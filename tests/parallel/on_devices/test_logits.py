"""Logits of models on meshes are those of one device: an axis of each kind in every run, all families in the wide.

They are so in every bit, except where an axis splits sums, or a ring joins them.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import jax
import pytest

from jaxinfer import LanguageModel
from jaxinfer.decoding import programs
from tests.decoding.covered_models import random_prompts
from tests.decoding.identity import check_screened
from tests.decoding.strategy_cases import Split
from tests.parallel.on_devices.meshes import (
    MODELS,
    SPLIT_HEADS,
    SPLIT_LAYERS,
    SPLIT_TOKENS,
    check_logits,
    on_split,
)

EVERY_KIND = [
    Split("tensor=4", "llama"),
    Split("data=2", "llama"),
    Split("data=2,sequence=2", "llama"),
    Split("data=2,pipeline=2", "llama", 3),
]
WIDE = Split("data=2,sequence=2,tensor=2", "gpt2")
# Norms after the layers and over heads' channels, and multipliers.
OTHERS = [
    Split("tensor=8", "llama"),
    Split("tensor=2,pipeline=2", "gemma2", 3),
    Split("pipeline=4", "opt", 6),
    Split("tensor=2", "olmo2"),
    Split("data=2,tensor=2,pipeline=2", "granite", 3),
]


def name_of(split: Split) -> str:
    return f"{split.model}-{split.mesh}-{split.microbatches or 1}"


def check(single, split: Split, **changes: Any) -> None:
    one, lm = on_split(single, split, **changes)
    prompts = random_prompts()
    texts = [*([*prompt, *prompts[-1][:36]] for prompt in prompts), prompts[0][:9]]
    check_logits(lm, texts, one.lm.logits(texts))


@pytest.mark.parametrize("split", EVERY_KIND, ids=name_of)
def test_logits_are_those_of_one_device(single, split):
    check(single, split)


def test_logits_of_prompts_around_a_ring_are_those_of_one_device(single):
    """Which prompts go around only without our CPU kernels."""
    check(single, Split("sequence=2,tensor=2", "llama"), cpu_kernels=False)


@pytest.mark.parametrize(
    "split",
    [
        pytest.param(WIDE, marks=pytest.mark.slow),
        *(pytest.param(split, marks=pytest.mark.exhaustive) for split in OTHERS),
    ],
    ids=name_of,
)
def test_logits_of_every_family_are_those_of_one_device(single, split):
    check(single, split)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "model"), list(product((*SPLIT_HEADS, *SPLIT_TOKENS, *SPLIT_LAYERS), MODELS)))
def test_all_logits_are_those_of_one_device(single, mesh, model):
    check(single, Split(mesh, model))


@pytest.mark.parametrize(
    "model",
    ["llama", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MODELS[1:])],
)
def test_texts_of_these_tests_are_screened(single, model):
    check_screened(single(model).lm, single(model).asked)


@pytest.mark.exhaustive
@pytest.mark.parametrize("split", [Split("sequence=4", "gemma2"), Split("sequence=3", "llama")], ids=name_of)
def test_what_does_not_go_around_a_ring_is_prefilled_chunk_by_chunk(single, split, monkeypatch):
    """Layers with a window keep rings of slots of their own; three devices have no six parts of 128 tokens."""
    monkeypatch.setattr(programs, "PREFILL_CHUNK", 32)
    check(single, split)


@pytest.mark.slow
def test_kernels_run_inside_a_stage_on_each_devices_own_heads_and_rows(single):
    one = single("gpt2")
    backend = replace(one.lm.backend, kernels="reference")
    texts = [[5, 6, 7, 8], [9, 3, 2, 7]]
    mesh = one.on("data=2,tensor=2,pipeline=2").programs.partitioner.mesh
    lm = LanguageModel(one.lm.config, one.lm.params, backend, mesh=mesh)
    assert jax.device_count() == 8
    check_logits(lm, texts, one.lm.logits(texts))
