"""A device of several processes: the one that leads decides what runs, and the others run the same after it.

JAX asks that all processes of a mesh run the same programs in the same order. The leader has the engine. Each call of
its `Device` is told to the followers first (`jaxinfer.parallel.messages`), which make the same call of their own. What
a call copies to the host stays where it was copied, each process its own part, under a number that all know.
"""

import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from jaxinfer.decoding.strategy import Strategy
from jaxinfer.engine.device import Device, Saved
from jaxinfer.engine.programs import Rows
from jaxinfer.engine.shapes import Entry
from jaxinfer.errors import EngineClosed

# How often a follower that nobody tells anything looks whether it is to stop, in seconds.
_LOOK_SECONDS = 0.5
# How long a leader may take to fail as a follower has, in seconds: it may have to compile before it does.
_RESET_SECONDS = 300.0
EXIT_FAILED = 1
_END = "end"


class Call(NamedTuple):
    """A call of a device; saved content with the ``forgotten`` numbers is needed no more."""

    name: str
    arguments: tuple[Any, ...]
    forgotten: tuple[int, ...] = ()


class Numbered:
    """Content that each process has a part of, under a number."""

    def __init__(self, number: int, content: Any) -> None:
        self.number, self.content = number, content


class LedDevice:
    """Does what a `Device` does, and has the followers do it; ``tell`` sends them a message.

    Saved content cannot be read here, for a process has but a part of it.
    """

    def __init__(self, device: Device, tell: Callable[[Any], None]) -> None:
        self._device, self._tell = device, tell
        self._numbers = itertools.count()
        self._forgotten: list[int] = []
        # A call and its message are one: a thread that warms up must not come between.
        self._lock = threading.Lock()

    @property
    def strategy(self) -> Strategy:
        """How rows are decoded."""
        return self._device.strategy

    @property
    def strategies(self) -> dict[int, Strategy]:
        """See `Device`."""
        return self._device.strategies

    @property
    def drafts(self) -> bool:
        """Whether there are drafts."""
        return self._device.drafts

    @property
    def may_rest(self) -> bool:
        """Whether the text is the same without drafts."""
        return self._device.may_rest

    @property
    def compile_seconds(self) -> float:
        """The seconds that calls have waited for programs here."""
        return self._device.compile_seconds

    @property
    def is_preparing(self) -> bool:
        """See `Device.is_preparing`."""
        return self._device.is_preparing

    @property
    def compilations(self) -> int:
        """How many programs were compiled here."""
        return self._device.compilations

    def ready_nodes(self, num_rows: int, num_pages: int) -> list[int]:
        """See `Device.ready_nodes`."""
        return self._device.ready_nodes(num_rows, num_pages)

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compile all programs, at the same time as the followers do."""
        self._say("warm_up")
        self._device.warm_up(progress)

    def reset(self) -> None:
        """See `Device.reset`."""
        self._say("reset")
        self._device.reset()

    def drop(self) -> None:
        """Let go of pools and rows, and let the followers end."""
        self._say(_END)
        self._device.drop()

    def compute(
        self, tokens: Sequence[int], start: int, pages: Sequence[int], context_length: int, adapter: int = 0
    ) -> Any:
        """See `Device.compute`; only `enter` takes what it returns, before the next call."""
        arguments = list(tokens), start, list(pages), context_length, adapter
        self._say("compute", *arguments)
        return self._device.compute(*arguments)

    def copy_page(self, source: int, target: int) -> None:
        """See `Device.copy_page`."""
        self._say("copy_page", source, target)
        self._device.copy_page(source, target)

    def enter(self, slot: int, pages: Sequence[Any], hidden_1D: Any, entry: Entry) -> Any:
        """See `Device.enter`."""
        self._say("enter", slot, pages, entry)
        return self._device.enter(slot, pages, hidden_1D, entry)

    def start_drafting(self, slot: int, pages: Sequence[int], num_tokens: int) -> None:
        """See `Device.start_drafting`."""
        self._say("start_drafting", slot, pages, num_tokens)
        self._device.start_drafting(slot, pages, num_tokens)

    def start(
        self, slots: Sequence[int], pages: Sequence[Sequence[int]], max_steps: int, nodes: int | None = None
    ) -> Any:
        """See `Device.start`."""
        self._say("start", slots, pages, max_steps, nodes)
        return self._device.start(slots, pages, max_steps, nodes)

    def wait(self) -> None:
        """See `Device.wait`: of this process."""
        self._device.wait()

    def read(self, report: Any) -> Any:
        """See `Device.read`: every process has all of a report."""
        return self._device.read(report)

    def learn(self, answer: Sequence[int]) -> None:
        """See `Device.learn`."""
        self._say("learn", list(answer))
        self._device.learn(answer)

    def save(self, slot: int, pages: Sequence[int]) -> Saved:
        """See `Device.save`; the content is numbered."""
        return Saved(self.save_pages(pages), self._numbered("save_row", slot, self._device.read_row))

    def save_pages(self, pages: Sequence[int]) -> Numbered:
        """See `Device.save_pages`; the content is numbered."""
        return self._numbered("save_pages", pages, self._device.save_pages)

    def read_row(self, slot: int) -> Rows:
        """See `Device.read_row`: of strategies whose rows are on all devices."""
        self._say("read_row", slot)
        return self._device.read_row(slot)

    def restore(self, slot: int, pages: Sequence[int], saved: Saved) -> None:
        """See `Device.restore`; the row is numbered, or one that `read_row` returned."""
        row = saved.row
        self._say("restore", slot, pages, saved.pages.number, row.number if isinstance(row, Numbered) else row)
        self._device.restore(slot, pages, Saved(saved.pages.content, row.content if isinstance(row, Numbered) else row))

    def write_row(self, slot: int, row: Rows) -> None:
        """See `Device.write_row`."""
        self._say("write_row", slot, row)
        self._device.write_row(slot, row)

    def _numbered(self, name: str, what: Any, save: Callable[[Any], Any]) -> Numbered:
        number = next(self._numbers)
        self._say(name, number, what)
        try:
            numbered = Numbered(number, save(what))
        except BaseException:
            self._forgotten.append(number)
            raise
        weakref.finalize(numbered, self._forgotten.append, number)
        return numbered

    def _say(self, name: str, *arguments: Any) -> None:
        with self._lock:
            # One after the other: more may come meanwhile.
            forgotten = tuple(self._forgotten.pop() for _ in range(len(self._forgotten)))
            self._tell(Call(name, arguments, forgotten))


class Follower:
    """Makes the calls that a leader makes, in a thread of its own.

    ``make_device`` makes the device once the leader says how many pages it has; ``receive`` waits so many seconds for
    the next message; ``on_end`` is called in its thread once that ends. ``leader`` is the number of the process that
    leads. A call that fails here fails there too, and the leader begins anew. One that fails here alone ends this
    process by ``leave``, and with it the run: the others would wait for ever.
    """

    def __init__(
        self,
        make_device: Callable[[int], Device],
        receive: Callable[[float], Any],
        on_end: Callable[[], None] = lambda: None,
        *,
        leader: int = 0,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self._make_device, self._receive, self._on_end, self.leader = make_device, receive, on_end, leader
        self._leave = leave
        self._is_abandoned = self._has_ended = False
        self._hidden_1D: Any = None
        self._saved: dict[int, Any] = {}
        # What could not be copied to the host here, by its number: the leader may not have it either.
        self._unsaved: dict[int, Exception] = {}
        self.thread = threading.Thread(target=self._follow, name="jaxinfer-follower", daemon=True)
        self.thread.start()

    @property
    def is_open(self) -> bool:
        """Whether it follows."""
        return not (self._is_abandoned or self._has_ended)

    def abandon(self) -> None:
        """Follow no longer, whatever the leader does."""
        self._is_abandoned = True

    def _follow(self) -> None:
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="jaxinfer-compile") as beside:
                try:
                    self._make_calls(beside)
                finally:
                    self._has_ended = True
        except Exception as error:
            line = f"error: this process cannot follow process {self.leader}: {type(error).__name__}: {error}"
            print(line, file=sys.stderr, flush=True)
            self._leave(EXIT_FAILED)
        finally:
            self._on_end()

    def _make_calls(self, beside: ThreadPoolExecutor) -> None:
        num_pages, failed = self._next(), None
        if num_pages is None:
            return
        device = self._make_device(num_pages)
        while (call := self._next(failed)) is not None:
            if failed is not None and call.name != "reset":
                raise failed
            if call.name == _END:
                break
            for number in call.forgotten:
                self._saved.pop(number, None)
                self._unsaved.pop(number, None)
            if self._unsaved:
                raise next(iter(self._unsaved.values()))
            try:
                self._make(device, call, beside)
                failed = None
            except Exception as error:
                failed = error
        device.drop()

    def _next(self, failed: Exception | None = None) -> Any:
        """Return the next message, None if there is to be none; raise ``failed`` if none comes in time after it."""
        began = time.monotonic()
        while not self._is_abandoned:
            try:
                return self._receive(_LOOK_SECONDS)
            except TimeoutError:
                if failed is not None and time.monotonic() - began > _RESET_SECONDS:
                    raise failed from None
        return None

    def _check_goes_on(self, done: int, total: int) -> None:
        """Leave programs that nobody will run; called between two of them."""
        if self._has_ended:
            raise EngineClosed("the engine is closed")

    def _make(self, device: Device, call: Call, beside: ThreadPoolExecutor) -> None:
        name, arguments = call.name, call.arguments
        if name == "warm_up":
            beside.submit(device.warm_up, self._check_goes_on)
        elif name == "compute":
            self._hidden_1D = device.compute(*arguments)
        elif name == "enter":
            slot, pages, entry = arguments
            device.enter(slot, pages, self._hidden_1D, entry)
        elif name in ("save_pages", "save_row"):
            number, what = arguments
            try:
                self._saved[number] = (device.save_pages if name == "save_pages" else device.read_row)(what)
            except Exception as error:
                self._unsaved[number] = error
        elif name == "restore":
            slot, pages, number, row = arguments
            device.restore(slot, pages, Saved(self._saved[number], self._saved[row] if isinstance(row, int) else row))
        else:
            getattr(device, name)(*arguments)
