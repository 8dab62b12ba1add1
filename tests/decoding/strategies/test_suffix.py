"""Suffix decoding drafts the most frequent of what followed the longest repeated end, as counted in plain Python."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.decoding.strategies.suffix import Suffix
from jaxinfer.decoding.strategy import Proposal
from jaxinfer.errors import InvalidOption
from tests.decoding.drafted_alone import propose, state_of

Path = tuple[int, ...]


def expected_shares(text: list[int], strategy: Suffix) -> tuple[int, dict[Path, float]]:
    """Return the length of the longest repeated end, and each path's share of what followed it, the best first."""
    for size in range(min(strategy.max_match, len(text) - 1), strategy.min_match - 1, -1):
        ends = [end for end in range(size, len(text)) if text[end - size : end] == text[len(text) - size :]]
        if not ends:
            continue
        latest, counts = ends[::-1][: strategy.occurrences], Counter()
        depth = min(strategy.num_draft_tokens, strategy.per_token * size)
        for end in latest:
            follow = [text[end:][index % (len(text) - end)] for index in range(depth)]
            counts.update(tuple(follow[: index + 1]) for index in range(depth))
        # Counters list paths as they were first seen: after equally frequent and short ones, the latest first.
        best = sorted(counts, key=lambda path: (-counts[path], len(path)))[: strategy.num_draft_tokens]
        return size, {path: counts[path] / len(latest) for path in best}
    return 0, {}


def drafted(proposal: Proposal, row: int) -> dict[Path, float]:
    """Return the paths to the valid nodes of a row, and their chances, after checks of the tree's form."""
    tree = proposal.tree
    tokens, parents, valid = (np.asarray(field)[row] for field in (tree.tokens_BM, tree.parents_BM, tree.valid_BM))
    paths: list[Path] = [()]
    for node in range(1, len(tokens)):
        assert not valid[node] or (parents[node] < node and valid[parents[node]])
        paths.append((*paths[min(parents[node], node - 1)], int(tokens[node])))
    found = [node for node in range(1, len(tokens)) if valid[node]]
    assert len({paths[node] for node in found}) == len(found)
    return {paths[node]: float(np.asarray(proposal.chances_BM)[row, node]) for node in found}


@pytest.mark.parametrize(
    "strategy",
    [
        Suffix(num_draft_tokens=5, max_match=3, min_match=1, occurrences=4, per_token=1),
        Suffix(num_draft_tokens=6, max_match=4, min_match=2, occurrences=2, per_token=4),
        Suffix(num_draft_tokens=7, max_match=1, min_match=1, occurrences=24, per_token=2),
    ],
)
@settings(derandomize=True, max_examples=15, deadline=None)
@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=20), min_size=4, max_size=4))
def test_it_drafts_the_most_frequent_of_what_followed_the_longest_match(strategy, texts):
    proposal = propose(strategy, state_of(texts))
    np.testing.assert_array_equal(proposal.tree.tokens_BM[:, 0], [text[-1] for text in texts])
    for row, text in enumerate(texts):
        assert set(drafted(proposal, row)) == set(expected_shares(text, strategy)[1])


def test_a_longer_match_drafts_more_and_is_likelier_to_go_on():
    repeated = [1, 2, 3, 4, 5, 6, 7]
    texts = [[9, *repeated[-size:], 8, 10, 11, 12, *repeated[-size:]] for size in (1, 2, 3)]
    proposal = propose(Suffix(num_draft_tokens=8, min_match=1), state_of(texts))
    goes_on = (0.22, 0.49, 0.65, 0.66, 0.75, 0.9, 0.9, 0.9)
    for row, size in enumerate((1, 2, 3)):
        chances = drafted(proposal, row)
        assert [len(path) for path in chances] == list(range(1, 2 * size + 1))
        expected = np.cumprod(goes_on[size - 1 : 3 * size - 1])
        np.testing.assert_allclose(list(chances.values()), expected, rtol=1e-6)
    assert proposal.kinds_B.tolist() == [0, 1, 2]


def test_chances_are_shared_among_what_followed():
    text = [5, 1, 5, 2, 5, 1, 5, 1, 5]
    chances = drafted(propose(Suffix(num_draft_tokens=2, max_match=1, min_match=1, per_token=1), state_of([text])), 0)
    assert chances == pytest.approx({(1,): 0.75 * 0.22, (2,): 0.25 * 0.22})


def test_in_a_bounded_sum_it_drafts_what_there_is_place_for():
    assert Suffix().bounded(8) == Suffix(num_draft_tokens=7, min_match=1)
    assert Suffix(num_draft_tokens=4, min_match=3).bounded(8) == Suffix(num_draft_tokens=4, min_match=3)
    assert replace(Suffix(), max_match=2, per_token=3).max_depth == 6


def test_a_shortest_match_longer_than_the_longest_is_refused():
    with pytest.raises(InvalidOption, match="min_match=4 exceeds max_match=3"):
        Suffix(min_match=4, max_match=3)
