"""Load changes no bit: a request's tokens and log-probabilities are those that it has alone, by plain decoding.

Whatever arrives with it, in whatever order; with a shared prefix or without, preempted or not, in any row, whether it
drafts or not, and wherever its drafter rests.
"""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer import SamplingParams
from jaxinfer.decoding.batch import Request
from jaxinfer.decoding.fixed_rows import step_headroom
from jaxinfer.engine.config import EngineConfig
from jaxinfer.errors import EngineError
from tests.decoding.covered_models import cover_random
from tests.decoding.strategy_cases import CASES
from tests.engine.harness import SMALL, Arrival, Harness, tokens_of

# Pages are in bytes here; those of the other files are not.
MODEL, DTYPE, CACHE_DTYPE = "gemma2", "bfloat16", "int8"
# One that drafts by a model of its own, which a returning sequence has to find again, and one that learns as it goes.
USUAL = ("draft_model",)
SERVED = list(CASES)


@pytest.fixture(scope="module")
def covered():
    return cover_random(MODEL, DTYPE, CACHE_DTYPE)


@pytest.fixture(scope="module")
def harnesses(covered):
    """Return a function that makes an engine for each strategy once; later patterns find what earlier ones cached."""
    made: dict[str, Harness] = {}

    def get(name: str) -> Harness:
        if name not in made:
            made.clear()
            case = CASES.get(name)
            strategy = case.strategy(MODEL, covered.lm, covered.whole.texts) if case else covered.lm.resolve(name)
            made[name] = Harness(covered.lm, strategy, small(covered, strategy), covered.stopped.eos_token_ids)
        return made[name]

    return get


def small(covered, strategy) -> EngineConfig:
    """Return a configuration whose pages hold little more than the longest text and what a step writes past it."""
    most = max(request.max_length for request in covered.stopped.requests)
    most += step_headroom(strategy, covered.lm.programs.decoder.backend)
    return replace(SMALL, pages=max(SMALL.pages, -(-most // SMALL.page_size) + 2))


# When, which request, priority, after how many steps it is cancelled, and whose cache it may share.
arrivals = st.lists(
    st.tuples(
        st.integers(0, 12),
        st.integers(0, 4),
        st.integers(0, 2),
        st.sampled_from([None, None, None, 0, 1, 3, 9]),
        st.sampled_from(["", "", "other"]),
    ),
    min_size=1,
    max_size=7,
)
patterns = st.tuples(arrivals, st.sampled_from(["offload", "recompute"]), st.sampled_from(["exact", "exact", "off"]))


def check_pattern(covered, harness, pattern) -> Counter:
    """Serve a pattern and compare every request with itself alone; return what happened."""
    events, preemption, prefix_cache = pattern
    harness.change(preemption=preemption, prefix_cache=prefix_cache, aging_seconds=40.0, waiting_served_ratio=0.6)
    asked = covered.stopped
    served = harness.serve(
        [
            # One in four does not draft.
            Arrival(step, asked.requests[which], priority, cancelled, salt, drafts=(step + which) % 4 != 3)
            for step, which, priority, cancelled, salt in events
        ]
    )
    seen = Counter(patterns=1)
    for (_, which, _, cancelled, _), sequence in zip(events, served):
        expected, found = asked.oracle[which], tokens_of(sequence)
        if cancelled is None:
            result = sequence.origin.request.result(0.0)
            assert found == expected.tokens
            assert result.logprobs == tuple(expected.logprobs)
            seen["accepted"] += result.stats.accepted
            assert sequence.drafts or result.stats.drafted == 0
        else:
            assert found == expected.tokens[: len(found)]
            seen["cancelled"] += len(found) < len(expected.tokens)
        seen += Counter(preempted=sequence.preemptions, cached=sequence.cached_tokens)
    return seen


def check_patterns(covered, harness, count: int, happens=("preempted", "cached", "cancelled")) -> None:
    seen: Counter[str] = Counter()

    @settings(derandomize=True, max_examples=count, deadline=None)
    @given(patterns)
    def check(pattern):
        seen.update(check_pattern(covered, harness, pattern))

    check()
    assert seen["patterns"] >= count
    for what in happens:
        assert seen[what] > 0, f"no pattern had any {what}"
    assert seen["accepted"] > 0 or not harness.strategy.max_depth


@pytest.mark.parametrize("preemption", ["offload", "recompute"])
@pytest.mark.slow
@pytest.mark.parametrize("name", USUAL)
def test_who_made_room_goes_on_where_it_was(covered, harnesses, name, preemption):
    """All arrive at once on few pages, and the last of those that run give way again and again."""
    harness = harnesses(name)
    before, restored = harness.scheduler.preemptions, harness.restored
    pattern = [(0, which, 0, None, "") for which in (2, 3, 1) * 3]
    check_pattern(covered, harness, (pattern, preemption, "off"))
    assert harness.scheduler.preemptions > before + 2
    assert (harness.restored > restored + 2) == (preemption == "offload")


@pytest.mark.slow
@pytest.mark.parametrize("name", USUAL)
def test_what_cannot_be_copied_to_the_host_is_computed_again(covered, harnesses, name, monkeypatch):
    harness = harnesses(name)

    def fails(slot, pages):
        raise MemoryError("no room")

    monkeypatch.setattr(harness.core._device, "save", fails)
    before, restored = harness.scheduler.preemptions, harness.restored
    check_pattern(covered, harness, ([(0, which, 0, None, "") for which in (2, 3, 1)], "offload", "off"))
    assert harness.scheduler.preemptions > before
    assert harness.restored == restored


@pytest.mark.slow
@pytest.mark.parametrize("name", USUAL)
def test_of_those_that_wait_the_one_that_fits_no_more_is_refused(covered, harnesses, name):
    """Five pages are pinned; the first text needs more than what is left, the second had to make room for it."""
    harness = harnesses(name)
    scheduler, sampling = harness.scheduler, SamplingParams(ignore_eos=True)
    harness.change(prefix_cache="exact")
    (first,) = harness.serve([Arrival(0, Request([5] * 41, 42, sampling))])
    scheduler.held.pin("system", first.keys)
    large, small = harness.submit(Arrival(0, Request([7] * 20, 100, sampling))), None
    for _ in range(200):
        if small is None and large in scheduler.running:
            small = harness.submit(Arrival(0, Request([8] * 10, 60, sampling)))
        if not harness.core.step() and small is not None:
            break
        harness.now += 1
    scheduler.held.unpin("system")
    assert len(small.origin.request.result(0.0).tokens) == 50
    with pytest.raises(EngineError, match="pinned"):
        large.origin.request.result(0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", USUAL)
def test_load_changes_no_bit(covered, harnesses, name):
    check_patterns(covered, harnesses(name), 20)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SERVED)
def test_load_changes_no_bit_with_any_strategy(covered, harnesses, name):
    # Drafts that are taken often end a text before another one wants its pages.
    check_patterns(covered, harnesses(name), 30, ("cached", "cancelled"))


@pytest.mark.exhaustive
def test_numbers_of_nodes_that_take_turns_change_no_bit(covered, harnesses):
    harness = harnesses("prompt_lookup:num_draft_tokens=4,min_ngram=1+token_recycling:tree=dynamic:8+nodes=8")
    assert list(harness.core._device.strategies) == [1, 4, 8]
    check_patterns(covered, harness, 30, ("cached", "cancelled"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["glm4_moe", "gpt_oss"])
def test_load_changes_no_bit_of_a_model_of_experts(model):
    covered = cover_random(model, DTYPE)
    strategy = CASES["prompt_lookup"].strategy(model, covered.lm, covered.whole.texts)
    harness = Harness(covered.lm, strategy, small(covered, strategy), covered.stopped.eos_token_ids)
    check_patterns(covered, harness, 30, ("cached", "cancelled"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SERVED)
def test_load_changes_no_bit_in_hundreds_of_patterns(covered, harnesses, name):
    check_patterns(covered, harnesses(name), 400)
