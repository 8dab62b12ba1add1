"""Suffix decoding drafts the most frequent of what followed the longest repeated end, as counted in plain Python."""

import stat
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.decoding.drafting.past_answers import PastAnswers
from jaxinfer.decoding.drafting.text_matches import GOES_ON
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


def followed(past: list[list[int]], text: list[int], strategy: Suffix) -> tuple[int, dict[Path, float]]:
    """Do as `expected_shares` does, with past answers before the text; a path ends with the answer that it is from."""
    for size in range(strategy.max_match, strategy.min_match - 1, -1):
        end = text[len(text) - size :] if size <= len(text) else None
        found = [
            answer[at:]
            for answer in past
            for at in range(size, len(answer))
            if end is not None and answer[at - size : at] == end
        ]
        found += [
            (text[at:] * 20)[:20] for at in range(size, len(text)) if end is not None and text[at - size : at] == end
        ]
        if not found:
            continue
        latest, counts = found[::-1][: strategy.occurrences], Counter()
        depth = min(strategy.num_draft_tokens, strategy.per_token * size)
        for follow in latest:
            counts.update(tuple(follow[: index + 1]) for index in range(min(depth, len(follow))))
        return size, {path: counts[path] / len(latest) for path in counts}
    return 0, {}


@settings(derandomize=True, max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=9), max_size=3),
    st.lists(st.integers(1, 3), min_size=1, max_size=12),
)
def test_past_answers_are_drafted_from_as_if_they_stood_before_the_text(past, text):
    strategy = Suffix(num_draft_tokens=40, max_match=3, min_match=1, occurrences=3, per_token=2, past=32)
    answers = PastAnswers(32, 100)
    for answer in past:
        answers.add(answer)
    with_past = replace(strategy, answers=answers)
    drafts = drafted(propose(with_past, state_of([text]), params=answers.tokens_N), 0)
    size, shares = followed(past, text, strategy)
    assert set(drafts) == set(shares)
    for path, share in shares.items():
        # Frequency, and how often what followed such a match followed again.
        goes_on = float(np.prod([GOES_ON[min(size + depth, len(GOES_ON)) - 1] for depth in range(len(path))]))
        assert drafts[path] == pytest.approx(share * goes_on)


def test_the_latest_answers_are_kept_and_come_back_from_their_file(tmp_path):
    file = tmp_path / "answers"
    answers = PastAnswers(6, 100, file)
    for answer in ([1, 2, 3], [], [4, 5]):
        answers.add(answer)
    assert answers.tokens_N.tolist() == [1, 2, 3, -1, 4, 5]
    assert PastAnswers(9, 100, file).tokens_N.tolist() == [-1, -1, -1, 1, 2, 3, -1, 4, 5]
    assert [path.name for path in tmp_path.iterdir()] == ["answers"]
    with pytest.raises(InvalidOption, match="its answers are of 100 tokens, the model 50"):
        PastAnswers(6, 50, file)
    for content in (b"", b"jaxinfer answers 1 100\n123", b"jaxinfer answers 1 100\n" + np.int32([100]).tobytes()):
        file.write_bytes(content)
        with pytest.raises(InvalidOption, match=r"holds no answers|is damaged"):
            PastAnswers(6, 100, file)
    with pytest.raises(InvalidOption, match="no such folder"):
        PastAnswers(6, 100, tmp_path / "nowhere" / "answers")
    with pytest.raises(InvalidOption, match="past=16384"):
        Suffix(file="answers")


def test_two_add_to_one_file(tmp_path):
    """Each finds what the other has added, and one that remembers less does not make it shorter."""
    file = tmp_path / "answers"
    one, other, short = (PastAnswers(size, 100, file) for size in (8, 8, 2))
    one.add([1, 2])
    other.add([3])
    assert other.tokens_N.tolist() == [-1, -1, -1, -1, 1, 2, -1, 3]
    short.add([4, 5, 6])
    assert short.tokens_N.tolist() == [5, 6]
    one.add([7])
    assert one.tokens_N.tolist() == PastAnswers(8, 100, file).tokens_N.tolist() == [-1, 3, -1, 4, 5, 6, -1, 7]


def test_a_file_keeps_its_mode_and_a_link_its_file(tmp_path):
    file, link = tmp_path / "answers", tmp_path / "link"
    PastAnswers(6, 100, file).add([1])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o640)
    link.symlink_to(file)
    PastAnswers(6, 100, link).add([2])
    assert link.is_symlink()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert PastAnswers(3, 100, file).tokens_N.tolist() == [1, -1, 2]


def test_what_cannot_be_written_is_remembered(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    answers = PastAnswers(6, 100, tmp_path / "answers")
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        answers.add([7, 8])
    assert answers.tokens_N.tolist()[-2:] == [7, 8]
    assert not list(tmp_path.iterdir())
    answers.add([9])
    assert answers.tokens_N.tolist() == PastAnswers(6, 100, tmp_path / "answers").tokens_N.tolist()
    assert answers.tokens_N.tolist()[-4:] == [7, 8, -1, 9]
    (tmp_path / "answers").write_bytes(b"something else")
    answers.add([10])
    assert answers.tokens_N.tolist()[-4:] == [-1, 9, -1, 10]
    assert (tmp_path / "answers").read_bytes() == b"something else"


@pytest.mark.parametrize(
    "engine", [pytest.param(False, marks=pytest.mark.exhaustive), pytest.param(True, marks=pytest.mark.slow)]
)
def test_a_request_that_comes_again_is_drafted_from_its_answer(trained_model, engine):
    """No token changes, in a batch and in an engine."""
    lm, prompt, options = trained_model, "The old otter", {"max_new_tokens": 40}
    plain = lm.generate(prompt, **options)[0]
    strategy = "suffix:num_draft_tokens=7,past=256" + (",per_token=3" if engine else "")
    if engine:
        with lm.engine(strategy=strategy, max_rows=2, drafting="always") as running:
            found = [running.submit(prompt, **options).result() for _ in range(2)]
    else:
        found = [lm.generate(prompt, strategy=strategy, **options)[0] for _ in range(2)]
    assert [result.tokens for result in found] == [plain.tokens] * 2
    assert found[1].stats.steps <= max(10, found[0].stats.steps // 2)
