"""A window starts before the one before it is looked at, and whatever the look finds, no request notices."""

import pytest

import jaxinfer
from jaxinfer import SamplingParams
from jaxinfer.decoding.batch import Request
from jaxinfer.engine.config import EngineConfig
from tests.engine.harness import Arrival, Harness, tokens_of
from tests.toys import encode_bytes

PROMPTS = ["The old", "A small otter", "One grey", "The quick"]
SAMPLING = SamplingParams(ignore_eos=True)


class Watched(Harness):
    """Notes, in ``events``, windows as they start, with their rows, and looks, with the steps that they find.

    ``failed`` are the tokens of sequences that end before their time, and whether a window runs then.
    """

    def __init__(self, lm, strategy, max_rows, eos_token_ids=()):
        config = EngineConfig(max_rows=max_rows, page_size=8, pages=80, prefill_chunk=16, steps_per_look=4)
        super().__init__(lm, lm.resolve(strategy), config, eos_token_ids)
        self.events, self.failed, device = [], [], self.core._device
        start, read, fail = device.start, device.read, self.core.fail

        def started(slots, pages, *rest):
            kinds = [kind for kind, _ in self.events]
            windows = 1 + kinds.count("start") - kinds.count("look")
            running = {sequence.slot: sequence for sequence in self.scheduler.running}
            for slot, held in zip(slots, pages):
                # Whatever the windows that nobody has looked at yet have drawn, all of this one's has a page.
                length = min(len(running[slot].tokens) + 4 * windows, running[slot].max_length)
                assert len(held) >= self.scheduler.held.pages_for(length)
            self.events.append(("start", len(slots)))
            return start(slots, pages, *rest)

        def looked(report):
            found = read(report)
            self.events.append(("look", int(found.steps)))
            return found

        def failed(sequence, error):
            self.failed.append((len(tokens_of(sequence)), self.core._ahead is not None))
            fail(sequence, error)

        device.start, device.read, self.core.fail = started, looked, failed

    def serve_texts(self, *counts, **cancelled):
        """Serve so many new tokens of each prompt, all at once; return their tokens and what they should be."""
        del self.events[:]
        asked = [encode_bytes(prompt) for prompt, _ in zip(PROMPTS, counts)]
        requests = [Request(prompt, len(prompt) + count, SAMPLING) for prompt, count in zip(asked, counts)]
        return [
            tokens_of(sequence)
            for sequence in self.serve(
                [Arrival(0, each, cancelled_after=cancelled.get(f"row_{at}")) for at, each in enumerate(requests)]
            )
        ]


@pytest.fixture(scope="module")
def lm(trained_folder):
    return jaxinfer.load(trained_folder, max_len=200)


@pytest.fixture(scope="module")
def expected(lm):
    return [list(lm.generate(prompt, max_new_tokens=60, sampling=SAMPLING)[0].tokens) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def last_to_come(expected):
    """The token of the first text that comes for the first time last, and where it does."""
    first_places = {token: expected[0].index(token) for token in expected[0]}
    return max(first_places.items(), key=lambda pair: pair[1])


@pytest.fixture(scope="module")
def two_rows(lm, last_to_come):
    return Watched(lm, "autoregressive", 2, last_to_come[:1])


@pytest.mark.slow
def test_while_all_rows_run_the_next_window_starts_before_the_look(two_rows, expected):
    found = two_rows.serve_texts(20, 50)
    assert [list(each) for each in found] == [expected[0][:20], expected[1][:50]]
    events = two_rows.events
    both = events[events.index(("start", 2)) :]
    # In turns: the window after next starts before the next is looked at.
    assert both[:5] == [("start", 2), ("start", 2), ("look", 4), ("start", 2), ("look", 4)]
    # With a row that is free, whoever comes would wait for two windows.
    alone = events[events.index(("start", 1), len(events) - len(both)) :]
    assert alone[0::2] == [("start", 1)] * (len(alone) // 2)
    assert {kind for kind, _ in alone[1::2]} == {"look"}
    assert len(alone) > 6


def test_after_a_row_has_ended_the_window_that_has_started_does_nothing(two_rows, expected, last_to_come):
    """A stop token, which the device sees first, ends the first text."""
    _, place = last_to_come
    assert place > 5
    asked = [(encode_bytes(prompt), sampling) for prompt, sampling in zip(PROMPTS, (SamplingParams(), SAMPLING))]
    del two_rows.events[:]
    one, two = two_rows.serve([Arrival(0, Request(prompt, len(prompt) + 60, sampling)) for prompt, sampling in asked])
    assert list(tokens_of(one))[:place] == expected[0][:place]
    assert len(tokens_of(one)) <= place + 1
    assert list(tokens_of(two)) == expected[1]
    looks = [steps for kind, steps in two_rows.events if kind == "look"]
    assert looks.count(0) == 1
    # One step came before the second text was there.
    assert sum(looks) == 59 + 1


@pytest.mark.parametrize("after", [5, 6])
def test_who_is_cancelled_while_a_window_runs_gets_no_more_and_its_row_serves_another(two_rows, expected, after):
    """Its pages and its row are another's while its last report is still to come."""
    first, second, third = two_rows.serve_texts(60, 60, 60, row_0=after)
    assert two_rows.failed.pop() == (len(first), True)
    assert 0 < len(first) < 60
    assert list(first) == expected[0][: len(first)]
    assert [list(second), list(third)] == expected[1:3]


def test_a_row_that_only_pads_a_window_goes_on_in_its_own(two_rows, monkeypatch):
    """Where programs of more rows run, windows are padded by rows that take turns with theirs."""
    requests = [Request(encode_bytes(prompt), 60, SAMPLING) for prompt in PROMPTS[:2]]
    sequences = [two_rows.submit(Arrival(0, request)) for request in requests]
    while len(two_rows.scheduler.running) < 2:
        two_rows.core.step()
    for sequence in sequences:
        two_rows.scheduler._grow(sequence, 0.0)
    device = two_rows.core._device
    monkeypatch.setattr(device, "_sizes", lambda count: [2])
    for _ in range(2):
        for sequence in sequences:
            report = device.read(device.start([sequence.slot], [sequence.pages], 2, 1))
            assert report.steps == 2
            assert not report.finished_B[0]
    for sequence in sequences:
        sequence.is_cancelled = True
    two_rows.core.step()
