"""The engine without its thread: one step is one action of the scheduler, run on the device and told to its request."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from jaxinfer.decoding.rope_crossing import reachable_lengths, switch_lengths
from jaxinfer.engine.device import Device
from jaxinfer.engine.kept_pace import KeptPace
from jaxinfer.engine.led_device import LedDevice
from jaxinfer.engine.metrics import Counters, EngineMetrics
from jaxinfer.engine.output import SequenceOutput
from jaxinfer.engine.pace import FEW_STEPS
from jaxinfer.engine.prefix import PrefixOutput, PrefixRequest
from jaxinfer.engine.programs import Report
from jaxinfer.engine.scheduler import Chunk, Restore, Scheduler, Window
from jaxinfer.engine.sequence import EngineSequence, Stage
from jaxinfer.engine.shapes import Entry
from jaxinfer.errors import EngineError, InvalidOption, RequestCancelled, RequestTimedOut
from jaxinfer.models.config import DecoderConfig
from jaxinfer.results import StreamPiece

# Of calls: the most steps of a window while prompts come, and the seconds after which the host looks, if `FEW_STEPS`
# have run by then or more.
_STEPS_BETWEEN, _LONGEST_WINDOW = 2, 0.25


@dataclass(frozen=True)
class _Started:
    """A window that has started: its report, on the device, and when it started, in seconds.

    Its steps verify ``nodes`` nodes. ``waited`` says whether it waited for a program, or shared the cores with what
    makes one.
    """

    window: Window
    nodes: int
    report: Any
    began: float
    waited: bool


class EngineCore:
    """Runs what the scheduler decides; only one thread may call it.

    ``clock`` gives seconds. A sequence's ``origin`` is its `SequenceOutput`, and of one that ``is_prefix`` its
    `PrefixOutput`. ``kept_pace`` has what earlier cores have learnt of what steps cost. Where it ``serves_calls``, for
    whose results their callers wait, the configured steps of a window are the most that are worth it.
    """

    serves_calls = False

    def __init__(
        self,
        config: DecoderConfig,
        device: Device | LedDevice,
        scheduler: Scheduler,
        stop_ids: frozenset[int],
        clock: Callable[[], float],
        kept_pace: KeptPace,
    ) -> None:
        self.scheduler = scheduler
        self.counters = Counters()
        self._config, self._device, self._stop_ids, self._clock = config, device, stop_ids, clock
        # The prefixes that are kept, by name.
        self._prefixes: dict[str, EngineSequence] = {}
        self._is_stuck = False
        # The window that nobody has looked at yet, and when the last look was.
        self._ahead: _Started | None = None
        self._looked = 0.0
        # What a step took in the last window.
        self._step_seconds = _LONGEST_WINDOW
        # Whether the device may still compute what came before a window.
        self._computes = False
        # Of drafts that change the text, none may be left out for the sake of speed.
        adapts = device.may_rest and scheduler.config.drafting == "auto"
        self._pace = kept_pace.of(device.strategy, tuple(device.strategies)) if adapts else None
        self.kept_pace = kept_pace

    def add(self, sequence: EngineSequence) -> None:
        """Let a sequence wait."""
        sequence.drafts = sequence.drafts or not self._device.drafts
        sequence.salt = self._salt_of(sequence, sequence.context_length, sequence.salt)
        self.scheduler.add(sequence)

    def check_fits(self, sequence: EngineSequence) -> None:
        """Raise InvalidOption if a sequence, not added yet, may need more pages than there are; any thread may ask."""
        salt = self._salt_of(sequence, sequence.context_length, sequence.salt)
        needed, most = self.scheduler.held.own_pages(sequence, salt), self.scheduler.held.most_pages()
        if needed > most:
            raise InvalidOption(
                f"the request may need {needed} pages of {self.scheduler.config.page_size} tokens, but the engine has "
                f"{most}: shorten it, or give the engine more memory"
            )

    def cached_tokens(self, sequence: EngineSequence) -> int:
        """Return how many tokens of a sequence, not added yet, are in the cache now; any thread may ask."""
        salt = self._salt_of(sequence, sequence.context_length, sequence.salt)
        return self.scheduler.held.cached_tokens(sequence, salt)

    def metrics(self) -> EngineMetrics:
        """Return what it is like now; any thread may ask."""
        scheduler, pool = self.scheduler, self.scheduler.held.pool
        return EngineMetrics(
            waiting=len(scheduler.waiting),
            prefilling=len(scheduler.prefilling),
            running=len(scheduler.running),
            pages_in_use=pool.in_use,
            pages_cached=pool.cached,
            pages_free=pool.free,
            preemptions=scheduler.preemptions,
            compilations=self._device.compilations,
            compile_seconds=self._device.compile_seconds,
            **asdict(self.counters),
        )

    def release(self, name: str) -> None:
        """Let a prefix go, computed or not; one that there is not does no harm."""
        self._prefixes.pop(name, None)
        if name in self.scheduler.held.pinned:
            self.scheduler.held.unpin(name)
        for sequence in self._alive():
            if sequence.is_prefix and sequence.origin.name == name:
                self.fail(sequence, RequestCancelled("the prefix was released"))

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Read or compile all programs; see `Device.warm_up`."""
        self._device.warm_up(progress)

    def drop_device(self) -> None:
        """Let go of the device's memory; nothing runs afterwards."""
        self._ahead = None
        self._device.drop()
        self.kept_pace.keep()

    def step(self) -> bool:
        """Do one thing; return whether there was anything to do."""
        now = self._clock()
        for sequence in self.scheduler.expired(now):
            error = RequestCancelled("the request was cancelled")
            if not sequence.is_cancelled:
                error = RequestTimedOut("the request took longer than its timeout")
            self.fail(sequence, error)
        started, self._ahead = self._ahead, None
        action = self.scheduler.next(now) if started is None else started.window
        if action is None:
            return self._refuse_what_never_fits()
        self._is_stuck = False
        try:
            if isinstance(action, Chunk):
                self._compute(action)
            elif isinstance(action, Restore):
                self._restore(action.sequence)
            else:
                self._decode(started or self._start(action))
        except Exception as error:
            self._recover(action, error)
        return True

    def fail(self, sequence: EngineSequence, error: Exception) -> None:
        """End a request, by one of its sequences, with an error; one that has ended stays as it is."""
        request = sequence.origin.request
        # The sequence itself may be in none of the scheduler's lists: one that is being restored is not.
        for each in (sequence, *self._alive()):
            if each.origin.request is request and each.stage is not Stage.ENDED:
                self.scheduler.end(each)
                self.counters.ended(error)
        request.fail(error)

    def preempt(self, sequence: EngineSequence) -> None:
        """Keep what a sequence that has to make room needs to go on, if it is to be kept."""
        if self.scheduler.config.preemption == "offload" and sequence.stage is Stage.RUNNING:
            held = self.scheduler.held.pages_for(len(sequence.tokens))
            assert sequence.slot is not None
            try:
                sequence.saved = self._device.save(sequence.slot, sequence.pages[:held])
            except Exception:
                # It only read: nothing is lost, and the sequence is computed again.
                sequence.saved = None

    def _refuse_what_never_fits(self) -> bool:
        """End a sequence that waits though nothing runs: pages were pinned after it was taken."""
        scheduler, is_first_time = self.scheduler, not self._is_stuck
        if not scheduler.waiting or scheduler.running or scheduler.prefilling:
            return False
        unfit = next((each for each in scheduler.waiting if not scheduler.held.fits(each, each.salt)), None)
        if unfit is None and is_first_time:
            # The only one that ran has just made room, and another can go on.
            self._is_stuck = True
            return True
        reason = EngineError("the pages that the request needs are pinned: release a prefix")
        self.fail(unfit or scheduler.waiting[0], reason)
        return True

    def _alive(self) -> list[EngineSequence]:
        scheduler = self.scheduler
        return [*scheduler.waiting, *scheduler.prefilling, *scheduler.running]

    def _compute(self, chunk: Chunk) -> None:
        sequence, output = chunk.sequence, chunk.sequence.origin
        sequence.rests, self._computes = False, True
        began = self._clock()
        if output.started is None:
            output.started = began
        if chunk.copied is not None:
            self._device.copy_page(*chunk.copied)
        tokens = sequence.fill[chunk.start : chunk.start + chunk.count]
        pages = sequence.tables[chunk.row]
        hidden_1D = self._device.compute(tokens, chunk.start, pages, sequence.context_length, sequence.adapter)
        can_decode = self.scheduler.computed(chunk)
        self.counters.prompt_tokens += chunk.count
        if not can_decode:
            output.prefill_seconds += self._clock() - began
            return
        if len(sequence.tokens) == sequence.prompt_length:  # not where it is computed again
            self.counters.cached_tokens += sequence.cached_tokens
        if sequence.is_prefix:
            self.scheduler.held.pin(output.name, sequence.keys, self.scheduler.held.tail_of(sequence))
            self._prefixes[output.name] = sequence
            self.scheduler.end(sequence)
            output.request.finish()
            return
        report = self._enter(sequence, hidden_1D)
        output.prefill_seconds += self._clock() - began
        if report is not None:
            self._take([sequence], report)

    def _enter(self, sequence: EngineSequence, hidden_1D: Any) -> Any:
        """Put a sequence that is computed up to this hidden state into its row; return the report, if there is one."""
        context_1, longest_1 = (np.array([length]) for length in (sequence.context_length, sequence.max_length))
        limit = int(reachable_lengths(self._config, context_1, longest_1)[0])
        draws = len(sequence.tokens) == sequence.prompt_length
        request = sequence.origin.row.request.request
        lengths = sequence.prompt_length, sequence.context_length, limit
        entry = Entry(sequence.tokens, *lengths, draws, request.sampling, request.sample, sequence.adapter)
        assert sequence.slot is not None
        return self._device.enter(sequence.slot, sequence.pages, hidden_1D, entry)

    def _restore(self, sequence: EngineSequence) -> None:
        assert sequence.slot is not None
        self._computes = True
        self._device.restore(sequence.slot, sequence.pages, sequence.saved)
        sequence.saved, sequence.computed = None, len(sequence.tokens) - 1
        self.scheduler.restored(sequence)

    def _start(self, window: Window) -> _Started:
        """Start a window; drafters that have rested begin anew before."""
        sequences, nodes = window.sequences, self._nodes(window)
        rests = nodes == 1 and self._device.drafts
        for sequence in sequences:
            if sequence.rests and not rests:
                assert sequence.slot is not None
                self._device.start_drafting(sequence.slot, sequence.pages, len(sequence.tokens))
            sequence.rests = rests
        slots = [sequence.slot for sequence in sequences if sequence.slot is not None]
        if self._pace is not None and self._computes:
            # Else the time of a prompt's chunk would count as that of steps, and the choice would follow it.
            self._device.wait()
        self._computes = False
        began, made = self._clock(), self._device.compile_seconds
        pages, steps = [self._pages_of(each) for each in sequences], self._steps(window, nodes)
        report = self._device.start(slots, pages, steps, nodes)
        waited = self._device.compile_seconds != made or self._device.is_preparing
        return _Started(window, nodes, report, began, waited)

    def _pages_of(self, sequence: EngineSequence) -> Any:
        """Return a running sequence's pages as the device takes them."""
        return sequence.pages

    def _nodes(self, window: Window) -> int:
        """Return how many nodes the steps of a window verify."""
        sequences = window.sequences
        if not sequences[0].drafts:
            return 1
        if self._pace is None:
            return self._device.strategy.num_nodes
        ready = self._device.ready_nodes(len(sequences), max(len(sequence.pages) for sequence in sequences))
        if self.scheduler.others_come and not self.serves_calls:
            # Whoever waits for a first token waits for a window before each chunk of the prompt.
            ready = [nodes for nodes in ready if nodes != self._pace.ahead] or ready
        return self._pace.nodes(sequences, ready)

    def _steps(self, window: Window, nodes: int) -> int:
        """Return the most steps of a window: of calls, few where somebody reads along or what is chosen may change."""
        sequences, steps = window.sequences, window.steps
        pace = self._pace if sequences[0].drafts else None
        if self.serves_calls:
            if self.scheduler.others_come:
                steps = min(steps, _STEPS_BETWEEN)
            elif any(sequence.origin.callback is not None for sequence in sequences):
                steps = min(steps, FEW_STEPS)
            else:
                steps = steps if pace is None else pace.steps(sequences, nodes, steps)
                return min(steps, max(int(_LONGEST_WINDOW / self._step_seconds), FEW_STEPS))
        return steps if pace is None else pace.steps_between(sequences, nodes, steps)

    def _decode(self, started: _Started) -> None:
        """Start the window that follows, if it can, and look at the one that has started."""
        following = self.scheduler.following(started.window)
        if following is not None and self._nodes(following) == started.nodes:
            self._ahead = self._start(following)
        sequences, nodes = started.window.sequences, started.nodes
        report = self._device.read(started.report)
        now, steps = self._clock(), int(report.steps)
        seconds = now - max(started.began, self._looked)
        self._looked = now
        if steps:
            self._step_seconds = max(seconds / steps, 1e-6)
        pace = self._pace if sequences[0].drafts else None
        if pace is not None and steps:
            for index, sequence in enumerate(sequences if nodes > 1 else ()):
                pace.gained(sequence, nodes, int(report.counts_B[index]), int(report.steps_B[index]))
                pace.drafted(sequence, nodes, int(report.drafted_B[index]), int(report.steps_ahead_B[index]))
            # Waiting for a program says nothing about it, nor do the cores that the making of one leaves.
            is_telling = not (started.waited or self._device.is_preparing)
            pace.ran(sequences, nodes, steps, seconds if is_telling else None)
        self.counters.steps += steps
        self.counters.row_steps += int(report.steps_B[: len(sequences)].sum())
        self._take(sequences, report)
        self.scheduler.ran(steps)

    def _take(self, sequences: tuple[EngineSequence, ...] | list[EngineSequence], report: Report) -> None:
        """Tell each sequence's request what is new, and take out those that have ended."""
        now = self._clock()
        for index, sequence in enumerate(sequences):
            if sequence.stage is not Stage.RUNNING:
                continue
            output: SequenceOutput = sequence.origin
            count = int(report.counts_B[index])
            sequence.tokens += report.tokens_BE[index, :count].tolist()
            self.counters.output_tokens += count
            self.counters.accepted_tokens += int(report.accepted_B[index])
            is_last = self._has_ended(sequence, bool(report.finished_B[index]))
            try:
                self._tell(output, output.take(report, index, is_last, now))
            except BaseException as error:
                # A callback's mistake ends its own request alone, and sys.exit() is one too.
                self.fail(sequence, EngineError(f"the request's callback raised {type(error).__name__}: {error}"))
                continue
            if is_last or output.row.is_cut:
                self.scheduler.end(sequence)
                self.counters.ended(None)
                self._device.learn(sequence.tokens[sequence.prompt_length :])
                stats = output.stats(sequence.cached_tokens, sequence.preemptions)
                output.request.finish(output.result(), stats)
            elif report.finished_B[index]:
                sequence.salt = self._salt_of(sequence, len(sequence.tokens), cache_salt_of(sequence.salt))
                self.scheduler.requeue(sequence, len(sequence.tokens))

    def _salt_of(self, sequence: EngineSequence, context_length: int, cache_salt: str) -> str:
        return salt_of(rotary_regime(self._config, context_length), cache_salt, sequence.adapter)

    def _has_ended(self, sequence: EngineSequence, is_finished: bool) -> bool:
        """Tell an end from a text that has outgrown its rotation."""
        stops = not sequence.origin.row.request.request.sampling.ignore_eos and sequence.tokens[-1] in self._stop_ids
        return is_finished and (stops or len(sequence.tokens) >= sequence.max_length)

    def _tell(self, output: SequenceOutput, piece: StreamPiece) -> None:
        if output.callback is not None:
            output.callback(piece)
        if piece.text or piece.tokens:
            output.request.give(piece)

    def _recover(self, action: Chunk | Restore | Window, error: Exception) -> None:
        """End the requests of an action that failed; all others on the device begin anew."""
        failed = action.sequences if isinstance(action, Window) else (action.sequence,)
        reason = EngineError(f"the device failed: {type(error).__name__}: {error}")
        reason.__cause__ = error
        for sequence in failed:
            self.fail(sequence, reason)
            if sequence.is_prefix:
                self._prefixes.pop(sequence.origin.name, None)
        # A program that failed may have consumed the pools and rows that it was given.
        self._ahead = None
        for sequence in self.scheduler.running:
            self._lose(sequence)
        self.scheduler.lose_all()
        self._device.reset()
        begun = {sequence.origin.name for sequence in self._alive() if sequence.is_prefix}
        for name, kept in self._prefixes.items():
            if name not in begun:
                again = PrefixOutput(name, PrefixRequest())
                self.scheduler.add(replace(kept, stage=Stage.WAITING, pages=[], keys=[], origin=again))

    def _lose(self, sequence: EngineSequence) -> None:
        """Prepare a running sequence to begin anew without what the device held: its tokens are enough."""


def salt_of(regime: str, cache_salt: str, adapter: int = 0) -> str:
    """Return what a sequence's pages depend on besides its tokens; a regime has no slash, so no two give the same.

    A loaded adapter has the same number for as long as there are pages.
    """
    return f"{regime}{f';{adapter}' if adapter else ''}/{cache_salt}"


def cache_salt_of(salt: str) -> str:
    """Return the caller's part of `salt_of`."""
    return salt.partition("/")[2]


def rotary_regime(config: DecoderConfig, context_length: int) -> str:
    """Name what keys depend on besides tokens and positions: rotations that follow a text's length.

    ``longrope`` has two sets of factors, ``dynamic`` scaling one for each length past the original.
    """
    regimes = [sum(context_length > switch for switch in switch_lengths(config))]
    for kind in config.kinds:
        scaling = None if kind.rope is None else kind.rope.scaling
        if scaling is not None and scaling.kind == "dynamic":
            regimes.append(max(context_length, scaling.original_max_position))
    return ",".join(map(str, regimes))
