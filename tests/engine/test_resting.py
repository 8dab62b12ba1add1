"""A drafter that has rested knows what it would know had it never rested."""

import numpy as np
import pytest

import jaxinfer
from jaxinfer import SamplingParams
from jaxinfer.decoding.batch import Request
from jaxinfer.decoding.strategies.draft_model import DraftModel
from jaxinfer.engine.config import EngineConfig
from jaxinfer.models.model import Model
from tests.engine.harness import Arrival, Harness
from tests.toys import encode_bytes

CONFIG = EngineConfig(max_rows=2, page_size=8, pages=40, prefill_chunk=16, steps_per_look=4)


class Scripted:
    """Drafts, rests for five windows, and drafts again."""

    def __init__(self):
        self.windows, self.gains = 0, []

    def nodes(self, sequences, ready):
        self.windows += 1
        return 1 if 2 <= self.windows <= 6 else max(ready)

    def gained(self, sequence, nodes, tokens, steps):
        self.gains.append((self.windows, tokens, steps))

    def drafted(self, sequence, nodes, tokens, steps):
        pass

    def ran(self, sequences, nodes, steps, seconds):
        pass

    ahead = None

    def steps_between(self, sequences, nodes, most):
        return most


@pytest.fixture(scope="module")
def harness(trained_folder):
    lm = jaxinfer.load(trained_folder, max_len=200)
    # The model drafts for itself: every draft is taken, as long as its drafter has seen the whole text.
    itself = DraftModel(num_draft_tokens=3, config=lm.config, backend=lm.backend, params=lm.params)
    return Harness(lm, lm.resolve(itself), CONFIG), lm


def serve(made, pace, max_new_tokens=80):
    made.core._pace = pace
    request = Request(encode_bytes("The old"), len("The old") + max_new_tokens, SamplingParams(ignore_eos=True))
    (sequence,) = made.serve([Arrival(0, request)])
    return sequence


@pytest.mark.slow
def test_a_drafter_that_has_rested_begins_anew(harness):
    made, lm = harness
    pace = Scripted()
    sequence = serve(made, pace)
    expected = lm.generate([encode_bytes("The old")], max_new_tokens=80, sampling=SamplingParams(ignore_eos=True))[0]
    result = sequence.origin.request.result(0.0)
    assert result.tokens == expected.tokens
    # Twenty plain steps, and the others give four tokens each as long as there is room.
    after = [tokens / steps for window, tokens, steps in pace.gains if window > 6]
    assert len(after) > 1
    assert set(after[:-1]) == {4.0}
    assert result.stats.steps == 4 + 20 + -(-(80 - 1 - 16 - 20) // 4)


@pytest.mark.slow
def test_the_time_of_a_prompts_chunk_is_not_that_of_steps(harness, monkeypatch):
    made, _ = harness
    events, device = [], made.core._device
    for name in ("compute", "wait", "start"):
        call = getattr(device, name)
        monkeypatch.setattr(
            device, name, lambda *given, call=call, name=name: (events.append(name), call(*given))[1], raising=True
        )
    serve(made, Scripted(), max_new_tokens=20)
    assert events[:3] == ["compute", "wait", "start"]
    # Nothing is waited for where nothing was computed.
    assert "wait" not in events[3:]
    del events[:]
    serve(made, None, max_new_tokens=8)
    assert "wait" not in events


@pytest.mark.slow
def test_windows_without_drafts_keep_the_state_that_the_current_token_was_drawn_from(harness):
    made, lm = harness
    checked, start = [], made.core._device.start

    def watched(slots, pages, max_steps, nodes):
        report = start(slots, pages, max_steps, nodes)
        if nodes == 1:
            hidden_1D = made.core._device._rows.hidden_BD[np.array(slots)]
            drawn = int(Model(lm.programs.decoder, lm.params).logits(hidden_1D[:, None])[0, 0].argmax())
            checked.append(drawn == int(report.tokens_BE[0, int(report.counts_B[0]) - 1]))
        return report

    made.core._device.start = watched
    try:
        serve(made, Scripted(), 50)
    finally:
        made.core._device.start = start
    assert checked == [True] * 5
