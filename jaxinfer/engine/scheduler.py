"""Decides what the device does next: policy only, without JAX and without a clock of its own.

Between two windows of decoding at most one chunk of a prompt is computed. When prompts may interrupt decoding at all is
the rule of text-generation-inference: once ``waiting_served_ratio`` times as many sequences wait as run, or
``max_waiting_tokens`` steps after the last admission. Sequences come first by priority, to which waiting adds, then by
arrival. A sequence that does not fit lets a few smaller ones pass. Where pages run out, the last sequence of the lowest
priority makes room; the oldest always goes on.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jaxinfer.engine.config import EngineConfig
from jaxinfer.engine.held_pages import HeldPages
from jaxinfer.engine.sequence import EngineSequence, Stage

# Sequences that have part of their prompt computed at a time, and how often a longer one lets a shorter one go first.
_MOST_PREFILLING, _MOST_SKIPS = 4, 4
# How much shorter windows are while prompts come. `jaxinfer bench throughput` measures what that is worth.
_SHORTER = 4
# Fewer tokens than these are computed sooner than a page is copied.
_LEAST_COPIED = 4
# How many sequences may pass one that does not fit yet.
_MOST_PASSES = 16


@dataclass(frozen=True)
class Chunk:
    """Compute ``count`` tokens from ``start`` on of a sequence's text; the last chunk is followed by its first draw.

    Before, copy one page to another, ``copied`` from and to. They are tokens of the sequence's row ``row``.
    """

    sequence: EngineSequence
    start: int
    count: int
    copied: tuple[int, int] | None = None
    row: int = 0

    @property
    def ends_row(self) -> bool:
        """Whether the row is then computed; once it is the last one, the sequence can decode."""
        return self.start + self.count == self.sequence.to_fill


@dataclass(frozen=True)
class Restore:
    """Put back what the host has kept of a sequence."""

    sequence: EngineSequence


@dataclass(frozen=True)
class Window:
    """Decode these sequences until one ends, at most ``steps`` steps each; all of them may draft, or none."""

    sequences: tuple[EngineSequence, ...]
    steps: int


Action = Chunk | Restore | Window


class Scheduler:
    """The sequences of an engine, and what is to be done with them.

    ``held`` has its pages. ``tokens_per_step`` is the most tokens that a step adds to a sequence. ``preempt`` is called
    when a sequence loses its row and pages, before these are given to others. There are ``num_slots`` sequences at most
    that run, each with its rows.
    """

    def __init__(
        self,
        config: EngineConfig,
        held: HeldPages,
        *,
        tokens_per_step: int,
    ) -> None:
        self.config = config
        self.held = held
        self.waiting: list[EngineSequence] = []
        self.prefilling: list[EngineSequence] = []
        self.running: list[EngineSequence] = []
        self.preemptions = 0
        self._tokens_per_step = tokens_per_step
        self.preempt: Callable[[EngineSequence], None] = lambda sequence: None
        self.num_slots = config.max_rows // held.rows_each
        self._free_slots = list(range(self.num_slots - 1, -1, -1))
        self._steps_since_admission = 0
        self._was_chunk = False
        self._is_turn_of_drafts = False

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.waiting or self.prefilling or self.running)

    def add(self, sequence: EngineSequence) -> None:
        """Let a sequence wait."""
        self.waiting.append(sequence)

    def expired(self, now: float) -> list[EngineSequence]:
        """Return the sequences that are cancelled or past their deadline."""
        alive = (*self.waiting, *self.prefilling, *self.running)
        return [each for each in alive if each.is_cancelled or (each.deadline is not None and now >= each.deadline)]

    @property
    def others_come(self) -> bool:
        """Whether prompts are computed, or can be: rows that wait for them are idle."""
        return bool(self.prefilling or (self.waiting and self._free_slots))

    def next_deadline(self) -> float | None:
        """Return when the next sequence expires."""
        alive = (*self.waiting, *self.prefilling, *self.running)
        return min((each.deadline for each in alive if each.deadline is not None), default=None)

    def next(self, now: float) -> Action | None:
        """Return what to do next, None if nothing can be done.

        Call `computed` after a chunk, `restored` after a restoration and `ran` after a window.
        """
        if self._was_chunk:
            self._was_chunk = False
            window = self._window(now, self.config.steps_per_look // (_SHORTER if self.others_come else 1))
            if window is not None:
                return window
        action = self._next_prefill(now)
        self._was_chunk = action is not None
        return action or self._window(now, self.config.steps_per_look)

    def following(self, window: Window) -> Window | None:
        """Return the window after one that has started and has not been looked at, None if that has to come first.

        While a row is free, whoever comes would wait for both. Pages are those of two windows, and nobody makes room.
        """
        sequences = window.sequences
        if sequences[0].rows > 1:
            # The host does not know yet which pages they will have.
            return None
        is_steady = not (self._free_slots or self.prefilling) and len(sequences) == len(self.running)
        if not is_steady or any(each.stage is not Stage.RUNNING for each in sequences):
            return None
        if min(each.max_length - len(each.tokens) for each in sequences) <= window.steps:
            return None
        missing = [max(self.held.pages_for(self._reach(each, 2)) - len(each.pages), 0) for each in sequences]
        taken = self.held.pool.take(sum(missing))
        if taken is None:
            return None
        for sequence, count in zip(sequences, missing):
            sequence.pages += taken[:count]
            taken = taken[count:]
        return Window(sequences, self.config.steps_per_look)

    def computed(self, chunk: Chunk) -> bool:
        """Note that a chunk is in the cache; tell whether the sequence can decode now."""
        sequence = chunk.sequence
        sequence.computed = chunk.start + chunk.count
        self.held.share(sequence)
        if not chunk.ends_row or sequence.next_row(self.config.page_size):
            return False
        self.held.share_tail(sequence)
        self.prefilling.remove(sequence)
        self._run(sequence)
        return True

    def restored(self, sequence: EngineSequence) -> None:
        """Note that a sequence is on the device again."""
        self._run(sequence)

    def ran(self, steps: int) -> None:
        """Note that a window of so many steps has run, and that its sequences have grown."""
        self._steps_since_admission += steps
        for sequence in self.running:
            self._share_all(sequence)

    def end(self, sequence: EngineSequence) -> None:
        """Take a sequence out, wherever it is; its pages and its row are free at once."""
        if sequence.stage is Stage.RUNNING:
            self._share_all(sequence)
        for stage in (self.waiting, self.prefilling, self.running):
            if sequence in stage:
                stage.remove(sequence)
        self._release(sequence)
        sequence.stage, sequence.saved = Stage.ENDED, None

    def requeue(self, sequence: EngineSequence, context_length: int) -> None:
        """Let a running sequence begin anew with all of its text, rotated for another length."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.context_length, sequence.keys = context_length, []
        self._wait_again(sequence)

    def lose_all(self) -> None:
        """Let all sequences on the device begin anew: what it held is lost, shared and pinned pages too."""
        self.held.lose_all()
        for sequence in (*self.prefilling, *self.running):
            self._release(sequence)
            self._wait_again(sequence)
        self.prefilling, self.running = [], []

    def check(self) -> None:
        """Raise AssertionError if a page or a row is lost or has two owners."""
        alive = (*self.waiting, *self.prefilling, *self.running)
        self.held.check(alive)
        slots = [each.slot for each in alive if each.slot is not None]
        assert sorted([*slots, *self._free_slots]) == list(range(self.num_slots)), "a row is lost or used twice"

    def _next_prefill(self, now: float) -> Chunk | Restore | None:
        oldest = self.prefilling[0] if self.prefilling else None
        if oldest is not None and oldest.skipped >= _MOST_SKIPS:
            oldest.skipped = 0
            return self._chunk(oldest)
        action = self._admit(now) if self._may_admit() else None
        if action is None and oldest is not None:
            action = self._chunk(min(self.prefilling, key=lambda each: each.left_to_fill))
        if action is not None and oldest is not None and action.sequence is not oldest:
            oldest.skipped += 1
        return action

    def _chunk(self, sequence: EngineSequence) -> Chunk:
        # Chunks end on a grid of absolute positions, wherever a shared prefix ends.
        size = self.config.prefill_chunk
        end = min((sequence.computed // size + 1) * size, sequence.to_fill)
        copied, sequence.fork = sequence.fork, None
        return Chunk(sequence, sequence.computed, end - sequence.computed, copied, sequence.row_to_fill)

    def _may_admit(self) -> bool:
        """Whether new sequences may interrupt those that run."""
        if not self.waiting or not self._free_slots or len(self.prefilling) >= _MOST_PREFILLING:
            return False
        if not self.running:
            return True
        if self._steps_since_admission >= self.config.max_waiting_tokens:
            return True
        return len(self.waiting) >= int(len(self.running) * self.config.waiting_served_ratio)

    def _admit(self, now: float) -> Chunk | Restore | None:
        """Give the first waiting sequence that fits a row and pages, and return its first action."""
        config = self.config
        alone = not (self.running or self.prefilling)
        admitted = (*self.prefilling, *self.running)
        promised = sum(each.most_tokens for each in admitted)
        # Samples of one prompt come once it is computed.
        ordered = self._ordered((each for each in self.waiting if not each.is_led), now)
        # Those further back may not pass, and a long queue costs no more to look at.
        for place, sequence in enumerate(ordered[: _MOST_PASSES + 1]):
            if place and ordered[0].passed_over >= _MOST_PASSES:
                return None
            within = config.max_batch_total_tokens is None or (
                promised + sequence.most_tokens <= config.max_batch_total_tokens
            )
            within &= self._fits_budget(sequence)
            if (alone or within) and self._give_pages(sequence):
                if place:
                    ordered[0].passed_over += 1
                self.waiting.remove(sequence)
                sequence.slot = self._free_slots.pop()
                self._steps_since_admission = 0
                sequence.passed_over = 0
                if sequence.saved is not None:
                    return Restore(sequence)
                sequence.stage = Stage.PREFILLING
                self.prefilling.append(sequence)
                return self._chunk(sequence)
        return None

    def _fits_budget(self, sequence: EngineSequence) -> bool:
        """Whether what is admitted and not computed stays within the budget.

        A text that is longer than that by itself comes one at a time and does not count: those beside it are shorter,
        and are computed first.
        """
        if sequence.saved is not None:
            return True
        most, to_compute = self.config.max_batch_prefill_tokens, sequence.left_to_fill
        uncomputed = [each.left_to_fill for each in self.prefilling]
        room = most - sum(left for left in uncomputed if left <= most)
        if to_compute > min(most, room):
            to_compute -= self.held.num_found(sequence)
        return to_compute <= room if to_compute <= most else all(left <= most for left in uncomputed)

    def _give_pages(self, sequence: EngineSequence) -> bool:
        """Give a sequence the pages of all that it has to compute, those that are there already first."""
        size = self.config.page_size
        owners = sequence.owners(self.held.pages_for(len(sequence.tokens) + 1), size)
        needed = soon = _num_owned(owners)
        if sequence.preemptions:
            # With the pages of a first window too, or one that comes back would at once make room again.
            reach = self.held.pages_for(self._reach(sequence))
            soon = max(needed, _num_owned(sequence.owners(reach, size)))
        if soon > self.held.most_pages():
            # Only on pages that are pinned: these are found again, while what was saved has none of them.
            sequence.saved = None
        found, page, tail = ([], 0, 0) if sequence.saved is not None else self.held.find(sequence)
        # Those that run get their next pages first.
        reserve = soon - needed + sum(each.rows for each in self.running)
        more, pool = needed - len(found), self.held.pool
        taken = None if more + reserve > pool.available else pool.take(more)
        if taken is None:
            self.held.give_back(found)
            return False
        sequence.hold(self.held.tables(owners, [*found, *taken]))
        if sequence.saved is None:
            sequence.computed = len(found) * size
            if tail >= _LEAST_COPIED and taken:
                sequence.fork = page, taken[0]
                sequence.computed += tail
            if not sequence.preemptions and len(sequence.tokens) == sequence.prompt_length:
                # Later it finds what it has computed itself.
                sequence.cached_tokens = max(sequence.cached_tokens, sequence.computed)
        return True

    def _reach(self, sequence: EngineSequence, windows: int = 1) -> int:
        """Return how long a text may be after so many windows."""
        most = windows * self.config.steps_per_look * self._tokens_per_step
        return min(len(sequence.tokens) + most, sequence.max_length)

    def _run(self, sequence: EngineSequence) -> None:
        sequence.stage = Stage.RUNNING
        self.running.append(sequence)

    def _window(self, now: float, most_steps: int) -> Window | None:
        """Give every running sequence the pages of the coming steps, the first ones first."""
        for sequence in self._ordered(self.running, now):
            if sequence in self.running:
                self._grow(sequence, now)
        if not self.running:
            return None
        # Those that draft take turns with those that do not.
        self._is_turn_of_drafts = not self._is_turn_of_drafts
        turn = [each for each in self.running if each.drafts == self._is_turn_of_drafts]
        sequences = turn or self.running
        left = max(sequence.max_length - len(sequence.tokens) for sequence in sequences)
        return Window(tuple(sequences), max(1, min(most_steps, left)))

    def _grow(self, sequence: EngineSequence, now: float) -> None:
        while True:
            missing = max(self.held.pages_for(self._reach(sequence)) - len(sequence.pages), 0)
            taken = self.held.pool.take(missing * sequence.rows)
            if taken is not None:
                for row, table in enumerate(sequence.tables):
                    table += taken[row * missing : (row + 1) * missing]
                return
            victim = self._ordered([*self.prefilling, *self.running], now)[-1]
            self._make_room(victim)
            if victim is sequence:
                return

    def _make_room(self, sequence: EngineSequence) -> None:
        """Take row and pages from a sequence, which waits again."""
        self.preempt(sequence)
        self.preemptions += 1
        sequence.preemptions += 1
        for stage in (self.prefilling, self.running):
            if sequence in stage:
                stage.remove(sequence)
        self._release(sequence)
        self._wait_again(sequence)

    def _wait_again(self, sequence: EngineSequence) -> None:
        sequence.stage = Stage.WAITING
        self.waiting.append(sequence)

    def _release(self, sequence: EngineSequence) -> None:
        self.held.release(sequence)
        if sequence.slot is not None:
            self._free_slots.append(sequence.slot)
            sequence.slot = None

    def _share_all(self, sequence: EngineSequence) -> None:
        """Let later prompts find all of a running sequence but its last token, which no step has read yet."""
        sequence.computed = len(sequence.tokens) - 1
        self.held.share(sequence)

    def _ordered(self, sequences: Iterable[EngineSequence], now: float) -> list[EngineSequence]:
        """Return sequences in the order in which they are served."""
        aging = self.config.aging_seconds

        def rank(sequence: EngineSequence) -> tuple[float, int]:
            return -(sequence.priority + (now - sequence.arrival) // aging), sequence.number

        return sorted(sequences, key=rank)


def _num_owned(owners: list[list[int]]) -> int:
    """Return how many pages rows have together."""
    return sum(owner == row for row, row_owners in enumerate(owners) for owner in row_owners)
