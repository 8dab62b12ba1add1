"""An engine's core for beam searches: what differs where a sequence is a search with several rows."""

from typing import Any

import numpy as np

from jaxinfer.engine.beam_device import BeamDevice
from jaxinfer.engine.beam_output import BeamOutput
from jaxinfer.engine.beam_programs import BeamReport
from jaxinfer.engine.beam_sequence import BeamSequence
from jaxinfer.engine.core import EngineCore, cache_salt_of
from jaxinfer.engine.device import Saved
from jaxinfer.engine.led_device import LedDevice
from jaxinfer.engine.programs import Rows
from jaxinfer.engine.sequence import EngineSequence, Stage
from jaxinfer.engine.shapes import Entry
from jaxinfer.errors import EngineError


class BeamCore(EngineCore):
    """Runs searches; a sequence is a `BeamSequence`, or the computation of a prefix."""

    _device: BeamDevice | LedDevice

    def preempt(self, sequence: EngineSequence) -> None:
        if not isinstance(sequence, BeamSequence) or sequence.stage is not Stage.RUNNING:
            return
        slot, columns = sequence.slot, self.scheduler.held.pages_for(len(sequence.tokens))
        assert slot is not None
        try:
            row = self._device.read_row(slot)
        except Exception:
            # It only read: nothing is lost, and the search begins anew.
            self._begin_anew(sequence)
            return
        self._leave(sequence, row, columns)
        if self.scheduler.config.preemption == "offload":
            try:
                sequence.saved = self._device.save_pages(_own_pages(sequence))
            except Exception:
                sequence.saved = None

    def _enter(self, sequence: EngineSequence, hidden_1D: Any) -> BeamReport | None:
        assert isinstance(sequence, BeamSequence)
        assert sequence.slot is not None
        sequence.origin.began = self._clock()
        if sequence.kept is not None:
            self._device.write_row(sequence.slot, sequence.kept)
            sequence.went_on()
            return None
        request = sequence.origin.row.request.request
        length = len(sequence.tokens)
        entry = Entry(sequence.tokens, length, length, sequence.max_length, True, request.sampling, 0, sequence.adapter)
        return self._device.enter(sequence.slot, sequence.tables, hidden_1D, entry)

    def _restore(self, sequence: EngineSequence) -> None:
        assert isinstance(sequence, BeamSequence)
        assert sequence.slot is not None
        self._device.restore(sequence.slot, _own_pages(sequence), Saved(sequence.saved, sequence.kept))
        sequence.went_on()
        self.scheduler.restored(sequence)

    def _pages_of(self, sequence: EngineSequence) -> Any:
        return sequence.tables

    def _take(self, sequences: tuple[EngineSequence, ...] | list[EngineSequence], report: Any) -> None:
        """Note what searches have come to, and tell the texts of those that have ended."""
        now = self._clock()
        for index, sequence in enumerate(sequences):
            if not isinstance(sequence, BeamSequence) or sequence.stage is not Stage.RUNNING:
                continue
            sequence.tokens = report.best_BS[index, : report.lengths_B[index]].tolist()
            self.scheduler.held.forked(sequence, report.tables_BWX[index].tolist())
            sequence.origin.steps += int(report.steps_B[index])
            assert sequence.slot is not None
            if report.done_B[index]:
                self._finish(sequence, self._device.read_row(sequence.slot), now)
            elif report.waits_B[index]:
                self._compute_again(sequence, self._device.read_row(sequence.slot))

    def _finish(self, sequence: BeamSequence, row: Rows, now: float) -> None:
        output: BeamOutput = sequence.origin
        try:
            for each, piece in zip(
                output.outputs, output.take(row.state.ended, sequence.prompt_length, now), strict=True
            ):
                self.counters.output_tokens += len(piece.tokens)
                self._tell(each, piece)
        except BaseException as error:
            # A callback's mistake ends its own request alone, and sys.exit() is one too.
            self.fail(sequence, EngineError(f"the request's callback raised {type(error).__name__}: {error}"))
            return
        self.scheduler.end(sequence)
        for each in output.outputs:
            self.counters.ended(None)
            output.request.finish(each.result(), each.stats(sequence.cached_tokens, sequence.preemptions))

    def _compute_again(self, sequence: BeamSequence, row: Rows) -> None:
        """Let a search whose texts have outgrown their rotation wait, to be computed for texts as long as they are."""
        length, state = len(sequence.tokens), row.state
        state = state._replace(context_lengths_B=np.asarray(state.lengths_B), reach_B=np.asarray(state.limits_B))
        self._leave(sequence, row._replace(state=state), self.scheduler.held.pages_for(length))
        sequence.salt = self._salt_of(sequence, length, cache_salt_of(sequence.salt))
        self.scheduler.requeue(sequence, length)

    def _lose(self, sequence: EngineSequence) -> None:
        if isinstance(sequence, BeamSequence):
            self._begin_anew(sequence)

    def _begin_anew(self, sequence: BeamSequence) -> None:
        sequence.begin_anew()
        sequence.origin.steps = 0
        sequence.keys = []
        sequence.salt = self._salt_of(sequence, sequence.context_length, cache_salt_of(sequence.salt))

    def _leave(self, sequence: BeamSequence, row: Rows, columns: int) -> None:
        """Note what a search that leaves the device needs to go on."""
        length = len(sequence.tokens)
        texts = np.asarray(row.state.tokens_BWS)[0, :, :length].tolist()
        sequence.leave(row, texts, columns)


def _own_pages(sequence: BeamSequence) -> list[int]:
    """Return the pages that hold what a search has computed, each once, in the order in which they are given anew."""
    return [
        page
        for row, (table, owners) in enumerate(zip(sequence.tables, sequence.kept_owners, strict=True))
        for page, owner in zip(table, owners)
        if owner == row
    ]
