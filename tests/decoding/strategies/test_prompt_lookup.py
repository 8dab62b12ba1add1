"""Which earlier place prompt lookup drafts from, against a search written out in Python."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.decoding.strategies.prompt_lookup import PromptLookup
from jaxinfer.decoding.strategy import Target
from jaxinfer.errors import InvalidOption
from jaxinfer.ops.backend import choose_backend
from tests.decoding.drafted_alone import propose, state_of
from tests.toys import TINY_LLAMA


def expected_draft(text: list[int], strategy: PromptLookup) -> list[int] | None:
    """Return what followed the longest match of the text's end, repeated where it runs into the end."""
    for size in range(strategy.max_ngram, strategy.min_ngram - 1, -1):
        ends = [end for end in range(size, len(text)) if text[end - size : end] == text[len(text) - size :]]
        if ends:
            end = ends[-1] if strategy.match == "last" else ends[0]
            follow = text[end:]
            return [follow[index % len(follow)] for index in range(strategy.num_draft_tokens)]
    return None


def drafts(texts: list[list[int]], strategy: PromptLookup) -> list[list[int] | None]:
    tree = propose(strategy, state_of(texts)).tree
    np.testing.assert_array_equal(tree.tokens_BM[:, 0], [text[-1] for text in texts])
    return [
        tokens[1:].tolist() if valid[1:].all() else None
        for tokens, valid in zip(np.asarray(tree.tokens_BM), np.asarray(tree.valid_BM))
    ]


@pytest.mark.parametrize("match", ["last", "first"])
@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(3, 1), (4, 2), (1, 1)])
@settings(derandomize=True, max_examples=15, deadline=None)
@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=20), min_size=4, max_size=4))
def test_it_drafts_what_followed_the_longest_match(match, max_ngram, min_ngram, texts):
    strategy = PromptLookup(num_draft_tokens=5, max_ngram=max_ngram, min_ngram=min_ngram, match=match)
    assert drafts(texts, strategy) == [expected_draft(text, strategy) for text in texts]


def published_draft(text: list[int], num_drafts: int, max_ngram: int = 3) -> list[int] | None:
    """Return the first full continuation of the longest n-gram that has one, by the published search."""
    for size in range(max_ngram, 0, -1):
        for start in range(size, len(text) - num_drafts + 1):
            if text[start - size : start] == text[-size:] and size <= len(text) and start < len(text) - size:
                return text[start : start + num_drafts]
    return None


@pytest.mark.parametrize("num_drafts", [1, 3, 5])
@settings(derandomize=True, max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=20), min_size=4, max_size=4))
def test_the_published_rule_takes_the_first_full_continuation(num_drafts, texts):
    strategy = PromptLookup(num_draft_tokens=num_drafts, min_ngram=1, rule="published")
    assert drafts(texts, strategy) == [published_draft(text, num_drafts) for text in texts]


def test_a_longer_match_is_likelier_to_go_on():
    """As long as the texts are equal, further than what a match is looked for by."""
    repeated = [1, 2, 3, 4, 5, 6, 7]
    texts = [[9, *repeated[-size:], 8, *repeated[-size:]] for size in range(1, 8)]
    drafted = propose(PromptLookup(num_draft_tokens=3, min_ngram=1), state_of(texts))
    goes_on = (0.22, 0.49, 0.65, 0.66, 0.75, 0.9, 0.9, 0.9, 0.9)
    expected = [[1.0, *np.cumprod(goes_on[size - 1 : size + 2])] for size in (1, 2, 3, 4, 5, 6, 6)]
    np.testing.assert_allclose(drafted.chances_BM, expected, rtol=1e-6)
    assert drafted.kinds_B.tolist() == [0, 1, 2, 2, 2, 2, 2]


def test_in_a_bounded_sum_it_drafts_what_there_is_place_for():
    assert PromptLookup().bounded(8) == PromptLookup(num_draft_tokens=7, min_ngram=1)
    assert PromptLookup(num_draft_tokens=4, min_ngram=2).bounded(8) == PromptLookup(num_draft_tokens=4, min_ngram=2)


def test_a_shortest_match_longer_than_the_longest_is_refused():
    with pytest.raises(InvalidOption, match="min_ngram=4 exceeds max_ngram=3"):
        PromptLookup(min_ngram=4)


@pytest.mark.parametrize(
    ("platform", "dtype", "cpu_kernels", "shortest"),
    [
        ("tpu", "bfloat16", False, 1),
        ("cpu", "bfloat16", True, 2),
        ("cpu", "bfloat16", False, 1),
        ("cpu", "float32", False, 2),
    ],
)
def test_single_tokens_are_looked_up_where_nodes_cost_little(platform, dtype, cpu_kernels, shortest):
    """XLA's bfloat16 products on a CPU are padded to several rows, the kernels' are not."""
    target = Target(TINY_LLAMA, replace(choose_backend(dtype, platform), cpu_kernels=cpu_kernels), {})
    assert PromptLookup().resolve(target).min_ngram == shortest
    assert PromptLookup(max_ngram=1).resolve(target).min_ngram == 1
    assert PromptLookup(min_ngram=3).resolve(target).min_ngram == 3
    assert PromptLookup(rule="published").resolve(target).min_ngram == 1
