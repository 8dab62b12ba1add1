"""Whoever makes the calls that a leader makes holds what it holds, bit for bit.

Leader and follower are in one process here, each with a device of its own; `tests/parallel/test_distributed.py` has two
processes.
"""

import gc
import pickle
import queue
import time
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.decoding.batch import Request
from jaxinfer.decoding.strategies.draft_model import DraftModel
from jaxinfer.engine import led_device
from jaxinfer.engine.assembly import _led_core
from jaxinfer.engine.device import Device
from jaxinfer.engine.led_device import Call, Follower
from jaxinfer.errors import InvalidOption
from tests.engine.harness import SMALL, Arrival, Harness
from tests.toys import TINY_LLAMA, float32_backend, random_params

FEW = replace(SMALL, max_rows=2, pages=12)
ENDLESS = SamplingParams(temperature=1.0, ignore_eos=True)


class Followed(Harness):
    """An engine whose calls a follower makes, too."""

    def __init__(self, lm, strategy):
        self.messages, self.device = queue.Queue(), None
        super().__init__(lm, strategy, FEW, tell=lambda message: self.messages.put(pickle.dumps(message)))
        self.codes = []
        self.follower = Follower(self.make_device, self.receive, leave=self.codes.append)

    def receive(self, seconds):
        try:
            message = pickle.loads(self.messages.get(timeout=min(seconds, 0.01)))
        except queue.Empty:
            raise TimeoutError from None
        self.messages.task_done()
        return message

    def make_device(self, num_pages):
        own = self.core._device._device
        self.device = type(own)(
            self.programs,
            own._params,
            self.strategy,
            num_rows=own._num_rows,
            num_slots=own._num_slots,
            num_pages=num_pages,
            page_size=FEW.page_size,
            most_steps=FEW.steps_per_look,
            chunk=FEW.prefill_chunk,
            eos_token_ids=(),
        )
        # Its content is compared after its end.
        self.device.drop = lambda: None
        return self.device

    def settle(self):
        """Wait until the follower has made all calls; return what it holds and what the leader holds."""
        # What was forgotten is told with the next call.
        gc.collect()
        self.core._device.read_row(0)
        while self.messages.unfinished_tasks and self.follower.thread.is_alive():
            time.sleep(0.01)
        self.follower.abandon()
        self.follower.thread.join(30)
        assert not self.follower.thread.is_alive()
        assert self.codes == []
        return [(each._pools, each._rows) for each in (self.device, self.core._device._device)]


@pytest.fixture(scope="module")
def lm():
    return LanguageModel(TINY_LLAMA, random_params(TINY_LLAMA), float32_backend(), max_len=90)


def arrivals(count, most=60):
    return [Arrival(step, Request(list(range(step + 2, step + 22)), most, ENDLESS)) for step in range(count)]


@pytest.mark.parametrize(
    "name",
    [
        "autoregressive",
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("itself", "beam:width=2", "suffix:past=64")),
    ],
)
def test_the_follower_holds_what_the_leader_holds(lm, name):
    """Rows give way and come back with what each side kept of them."""
    itself = DraftModel(num_draft_tokens=3, config=lm.config, backend=lm.backend, params=lm.params)
    made = Followed(lm, lm.resolve(itself if name == "itself" else name))
    made.serve(arrivals(4))
    assert made.restored > 0 or name not in ("autoregressive", "itself")
    found, expected = made.settle()
    assert made.follower._saved == {}
    for mine, own in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(own))


class Told(Device):
    """A device that notes what it is told, and fails at some of it."""

    def __init__(self):
        self.calls = []

    def __getattribute__(self, name):
        if name == "calls":
            return object.__getattribute__(self, name)

        def call(*arguments):
            self.calls.append(name)
            if arguments == ("fails",):
                raise MemoryError("no room")

        return call


def follow(*names):
    """Return the codes with which a follower that is told some calls leaves, and the calls that it made.

    A number after a call is that of saved content which is needed no more.
    """
    told, codes, ends = Told(), [], []
    messages = [10]
    for name in names:
        *words, last = name.split()
        forgotten = (last,) if words and last.isdigit() else ()
        name, *arguments = words if forgotten else name.split()
        messages.append(Call(name, tuple(arguments), forgotten))

    def receive(seconds):
        if not messages:
            raise TimeoutError
        return messages.pop(0)

    follower = Follower(lambda num_pages: told, receive, lambda: ends.append(True), leave=codes.append)
    while messages and follower.thread.is_alive():
        follower.thread.join(0.01)
    follower.abandon()
    follower.thread.join(10)
    assert ends == [True]
    return codes, told.calls


def test_a_call_that_fails_on_both_sides_is_followed_by_a_new_beginning():
    assert follow("learn fails", "reset", "learn", "end") == ([], ["learn", "reset", "learn", "drop"])


def test_a_call_that_fails_here_alone_is_told_and_ends_the_process(capsys):
    assert follow("learn fails", "learn", "end") == ([1], ["learn"])
    assert "cannot follow process 0: MemoryError: no room" in capsys.readouterr().err


def test_a_call_that_fails_here_alone_ends_the_process_if_nothing_comes(monkeypatch):
    monkeypatch.setattr(led_device, "_RESET_SECONDS", 0.0)
    codes = []

    def receive(seconds):
        if not messages:
            raise TimeoutError
        return messages.pop(0)

    messages = [10, Call("learn", ("fails",))]
    Follower(lambda num_pages: Told(), receive, leave=codes.append).thread.join(10)
    assert codes == [1]


def test_a_leader_that_cannot_begin_lets_its_followers_end(lm):
    told, codes = [], []
    lengths = {"max_len": 90, "eos_token_ids": (), "clock": float}
    with pytest.raises(InvalidOption, match="width=4"):
        _led_core(lm.programs, lm.params, lm.resolve("beam:width=4"), FEW, tell=told.append, **lengths)
    follower = Follower(lambda num_pages: Told(), lambda seconds: told.pop(), leave=codes.append)
    follower.thread.join(10)
    assert (told, codes, follower.is_open) == ([], [], False)


@pytest.mark.parametrize("leader_has_it", [False, True])
def test_what_cannot_be_kept_here_ends_the_process_unless_the_leader_has_not_kept_it_either(leader_has_it):
    codes, calls = follow("read_row", "save_pages 0 fails", "learn" if leader_has_it else "learn 0", "end")
    assert codes == [1] * leader_has_it
    assert calls == ["read_row", "save_pages", *([] if leader_has_it else ["learn", "drop"])]
