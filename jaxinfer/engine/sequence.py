"""A sequence as the scheduler sees it: its tokens, its pages, and how far it has come."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Stage(Enum):
    """Where a sequence is on its way."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(eq=False)
class EngineSequence:
    """One row to be: a prompt's ids and what has been drawn after it.

    ``adapter`` is its loaded adapter, 0 for none. ``tokens`` grows from the prompt's. ``max_length`` bounds it.
    ``computed`` tokens are in the cache, on ``pages``, of which the first may be others' too. ``salt`` names what the
    pages depend on besides tokens. ``slot`` is its row on the device. ``context_length`` is the length of text that its
    rotary positions are for. ``saved`` is what the host keeps of a sequence that had to make room. One that ``drafts``
    may be decoded with the engine's strategy; its drafter ``rests`` after windows without, and its ``gain`` is how
    likely drafts were right for it of late, where 1 is usual, ``gain_ahead`` those of a model that decodes ahead, as
    ``steps_drafted`` and ``steps_ahead`` have shown. It waits for its ``leader``, which has the same prompt, to have
    computed it. ``fork`` names a page whose beginning serves and the own page to copy it to. ``origin`` is what the
    scheduler need not know: the request that it belongs to.
    """

    number: int
    tokens: list[int]
    max_length: int
    arrival: float
    priority: int = 0
    deadline: float | None = None
    salt: str = ""
    adapter: int = 0
    origin: Any = None
    is_prefix: bool = False
    stage: Stage = Stage.WAITING
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    prompt_length: int = 0
    context_length: int = 0
    keys: list[bytes] = field(default_factory=list)
    saved: Any = None
    skipped: int = 0
    passed_over: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    is_cancelled: bool = False
    drafts: bool = True
    rests: bool = False
    gain: float = 1.0
    gain_ahead: float = 1.0
    steps_drafted: int = 0
    steps_ahead: int = 0
    leader: "EngineSequence | None" = None
    fork: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self.prompt_length = self.prompt_length or len(self.tokens)
        self.context_length = self.context_length or len(self.tokens)

    @property
    def is_led(self) -> bool:
        """Whether another sequence is about to compute the same prompt."""
        return self.leader is not None and self.leader.stage in (Stage.WAITING, Stage.PREFILLING)

    @property
    def rows(self) -> int:
        """How many rows of a batch it takes."""
        return 1

    @property
    def tables(self) -> list[list[int]]:
        """The pages of each of its rows, in the order of their slots."""
        return [self.pages]

    @property
    def row_to_fill(self) -> int:
        """Which of its rows is computed now."""
        return 0

    @property
    def left_to_fill(self) -> int:
        """How many tokens have to be computed before it decodes."""
        return self.to_fill - self.computed

    @property
    def most_tokens(self) -> int:
        """How many tokens, prompt and output, it may reach."""
        return self.max_length

    def owners(self, columns: int, page_size: int) -> list[list[int]]:
        """Return, for each row and each of so many pages, the first row that has this page, or will have it."""
        return [[0] * columns]

    def hold(self, tables: list[list[int]]) -> None:
        """Take pages for each row."""
        (self.pages,) = tables

    def next_row(self, page_size: int) -> bool:
        """Go on to the next row that has something to compute, once one is; tell whether there is one."""
        return False

    @property
    def to_fill(self) -> int:
        """How many tokens the cache must hold before the sequence decodes.

        All of a prompt, whose next token is then drawn; and all but the last of a sequence that has drawn some already.
        """
        return len(self.tokens) - (len(self.tokens) > self.prompt_length)

    @property
    def fill(self) -> Sequence[int]:
        """The tokens that the cache must hold."""
        return self.tokens[: self.to_fill]
