"""A scheduler without a device: time is what the test says, and each step draws the same token."""

import itertools

from jaxinfer.engine.config import EngineConfig
from jaxinfer.engine.held_pages import HeldPages
from jaxinfer.engine.pages import PagePool
from jaxinfer.engine.prefixes import PrefixIndex
from jaxinfer.engine.scheduler import Chunk, Restore, Scheduler, Window
from jaxinfer.engine.sequence import EngineSequence, Stage


class Bench:
    """A scheduler whose device draws token 7 at every step, one a step."""

    def __init__(self, pages=40, tokens_per_step=1, headroom=1, shares_answers=True, **options):
        options = {"max_rows": 4, "page_size": 8, "prefill_chunk": 16, "steps_per_look": 2, **options}
        self.config = EngineConfig(**options)
        self.pool = PagePool(pages + 1)
        self.index = PrefixIndex(self.pool, self.config.page_size)
        held = HeldPages(self.config, self.pool, self.index, headroom=headroom, shares_answers=shares_answers)
        self.scheduler = Scheduler(self.config, held, tokens_per_step=tokens_per_step)
        self.scheduler.preempt = self._preempt
        self.numbers, self.now, self.log, self.copied = itertools.count(), 0.0, [], []
        self.offloads = self.config.preemption == "offload"
        self.per_step = tokens_per_step

    def add(self, tokens, new=4, **options):
        tokens = [1] * tokens if isinstance(tokens, int) else list(tokens)
        sequence = EngineSequence(next(self.numbers), tokens, len(tokens) + new, self.now, **options)
        self.scheduler.add(sequence)
        return sequence

    def step(self):
        """Do the next action and check that no page or row is lost."""
        action = self.scheduler.next(self.now)
        if isinstance(action, Chunk):
            assert action.start == action.sequence.computed
            if action.copied is not None:
                self.copied.append(action.copied)
            self.log.append(("chunk", action.sequence.number, action.start, action.count))
            if self.scheduler.computed(action) and len(action.sequence.tokens) == action.sequence.prompt_length:
                self._draw(action.sequence, 1)
        elif isinstance(action, Restore):
            self.log.append(("restore", action.sequence.number))
            action.sequence.saved, action.sequence.computed = None, len(action.sequence.tokens) - 1
            self.scheduler.restored(action.sequence)
        elif isinstance(action, Window):
            self.log.append(("window", *(sequence.number for sequence in action.sequences)))
            for sequence in action.sequences:
                # All that a step may write has a page.
                reach = min(len(sequence.tokens) + action.steps * self.per_step, sequence.max_length)
                assert len(sequence.pages) >= self.scheduler.held.pages_for(reach)
                self._draw(sequence, action.steps * self.per_step)
            self.scheduler.ran(action.steps)
        self.scheduler.check()
        self.now += 1.0
        return action

    def run(self, most=2000):
        for _ in range(most):
            if self.step() is None:
                return
        raise AssertionError("the scheduler never comes to an end")

    def _draw(self, sequence, count):
        count = min(count, sequence.max_length - len(sequence.tokens))
        sequence.tokens += [7] * count
        if len(sequence.tokens) == sequence.max_length:
            self.scheduler.end(sequence)

    def _preempt(self, sequence):
        self.log.append(("preempt", sequence.number))
        if self.offloads and sequence.stage is Stage.RUNNING:
            sequence.saved = "kept"


def chunks_of(bench, number):
    return [entry[2:] for entry in bench.log if entry[:2] == ("chunk", number)]
