"""The checks of exactness fail where the code is wrong: each mutant here changes tokens of the rows that it should.

That ordinary tests fail by such faults is what ``python -m tests.mutants`` shows; here it is told which rows change.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer import LanguageModel
from jaxinfer.cache.interface import LayeredCache
from jaxinfer.decoding import step
from jaxinfer.decoding.acceptance import rejection
from jaxinfer.decoding.programs import Programs
from tests.decoding.acceptance.joint_law import chance, draft_and_reject, random_chains
from tests.decoding.covered_models import Asked, ask, least_margins
from tests.decoding.rows import LEAST_MARGIN, SAMPLINGS, run
from tests.decoding.scripted import Branches, Chain

pytestmark = pytest.mark.slow

LENGTHS = (12, 3, 7, 5, 9)
NUM_NEW, DEPTH = 20, 3
PENALIZED = (3, 4)  # of the rows

Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def lm(tiny_llama_folder):
    return jaxinfer.load(tiny_llama_folder())


@pytest.fixture(scope="module")
def asked(lm):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 258, length).tolist() for length in LENGTHS]
    return ask(lm, prompts, [NUM_NEW] * len(prompts), SAMPLINGS)


def patch_keep(change: Callable[..., tuple[Any, ...]]) -> Patch:
    """Keep other slots of the cache than the accepted path's."""
    keep = LayeredCache.keep

    def kept(self: LayeredCache, start_B: Any, path_BM: Any, count_B: Any) -> LayeredCache:
        return keep(self, *change(start_B, path_BM, count_B))

    return lambda patch: patch.setattr(LayeredCache, "keep", kept)


def keep_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LayeredCache, "keep", lambda self, start_B, path_BM, count_B: self)


MUTANTS: Mapping[str, Patch] = MappingProxyType(
    {
        "a commit one slot too far": patch_keep(lambda start_B, path_BM, count_B: (start_B + 1, path_BM, count_B)),
        # In the scripted tree, the right one of two siblings comes second.
        "keys and values of the wrong sibling": patch_keep(
            lambda start_B, path_BM, count_B: (start_B, jnp.where(path_BM > 0, path_BM - 1, 0), count_B)
        ),
        "stale cache rows": keep_nothing,
    }
)


def wrong_rows(lm: LanguageModel, asked: Asked, drafter: type[Chain] = Branches, lies_from: int = 99) -> list[int]:
    """Draft every row's text with programs that are traced anew, and return the rows that come out wrong."""
    lm.programs = Programs(lm.programs.decoder)
    rows = run(lm, asked.requests, drafter(tuple(map(tuple, asked.texts)), DEPTH, lies_from))
    return [at for at, (row, plain) in enumerate(zip(rows, asked.oracle)) if row.tokens != plain.tokens]


def test_without_a_mutant_no_row_is_wrong(lm, asked):
    assert least_margins(lm, asked).min() > LEAST_MARGIN
    assert wrong_rows(lm, asked) == []


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_the_commit_changes_every_row(lm, asked, monkeypatch, name):
    MUTANTS[name](monkeypatch)
    assert wrong_rows(lm, asked) == list(range(len(LENGTHS)))


def test_a_token_too_many_after_a_refused_draft_changes_every_row(lm, asked, monkeypatch):
    until_end = step.until_end
    monkeypatch.setattr(step, "until_end", lambda state, tokens_BM, taken_B: until_end(state, tokens_BM, taken_B + 1))
    assert wrong_rows(lm, asked, Chain, lies_from=3) == list(range(len(LENGTHS)))


def test_penalties_that_ignore_ancestors_change_penalized_rows(lm, asked, monkeypatch):
    draw = step.draw

    def drawn(logits_BMV: Any, positions_BM: Any, arrays: Any, history: Any, **others: Any) -> Any:
        return draw(
            logits_BMV, positions_BM, arrays, history._replace(node_tokens_BM=None, ancestors_BMM=None), **others
        )

    monkeypatch.setattr(step, "draw", drawn)
    wrong = wrong_rows(lm, asked)
    assert wrong
    assert set(wrong) <= set(PENALIZED)


def test_a_residual_that_is_not_taken_changes_the_law(monkeypatch):
    target = random_chains(0, 5)
    drafter = random_chains(1, 5, target, 2.0)
    monkeypatch.setattr(rejection, "_residual", lambda left_BV, q_BV: left_BV)
    game = draft_and_reject(target, drafter, 40_000)
    assert chance(game.tokens_N3, target.law_VVV) < 1e-12
