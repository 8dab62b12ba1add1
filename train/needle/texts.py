"""Texts that a tiny model learns to find facts from: plain sentences with facts, and then questions for them."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxinfer.bench.needle.haystack import NAMES, SECRETS, fact, plain_sentence, question
from train.texts.batches import Batch


class Stage(NamedTuple):
    """So many steps, each of ``rows`` texts of ``length`` tokens, with facts and questions."""

    steps: int
    rows: int
    length: int
    facts: int
    questions: int


# From short texts to long ones: what is learned in the short ones holds in the long ones after a few steps.
STAGES = (
    Stage(300, 32, 48, 6, 10),
    Stage(150, 8, 256, 8, 16),
    Stage(80, 4, 512, 8, 24),
    Stage(100, 2, 2048, 8, 64),
)


def stage_at(step: int, stages: tuple[Stage, ...]) -> Stage:
    """Return the stage of a step, the last one's for any later step."""
    for stage in stages:
        if step < stage.steps:
            return stage
        step -= stage.steps
    return stages[-1]


def needle_batch(stage: Stage, encode: Callable[[str], list[int]], seed: int, step: int) -> Batch:
    """Return a step's texts, as a microbatch; only answers are predicted."""
    rng = np.random.default_rng((seed, step))
    rows = [_text(stage, encode, rng) for _ in range(stage.rows)]
    tokens_BT, mask_BT = (np.array(part) for part in zip(*rows))
    return Batch(tokens_BT[None].astype(np.int32), mask_BT[None])


def _text(stage: Stage, encode: Callable[[str], list[int]], rng: np.random.Generator) -> tuple[list[int], list[bool]]:
    names, secrets = (rng.permutation(words)[: stage.facts].tolist() for words in (NAMES, SECRETS))
    asked = [
        encode(f"{question(names[which])} {secrets[which]}.")
        for which in rng.integers(stage.facts, size=stage.questions)
    ]
    left = stage.length - sum(map(len, asked))
    parts = [encode(fact(name, secret)) for name, secret in zip(names, secrets)]
    left -= sum(map(len, parts))
    while left > 0:
        plain = encode(plain_sentence(rng))[:left]
        left -= len(plain)
        parts.insert(int(rng.integers(len(parts) + 1)), plain)
    tokens = [token for part in (*parts, *asked) for token in part]
    num_asked = sum(map(len, asked))
    mask = [False] * (len(tokens) - num_asked) + [at == len(part) - 1 for part in asked for at in range(len(part))]
    return tokens, mask
