"""What an engine is told once: its rows, its pages, and how it divides time between prompts and decoding."""

from dataclasses import dataclass, fields
from typing import Any, Literal, no_type_check

from jaxinfer.errors import InvalidOption

Preemption = Literal["offload", "recompute"]
PrefixCache = Literal["exact", "all", "off"]
Drafting = Literal["auto", "always"]


# The validation below must see any value; a run-time type checker would raise its own message first.
@no_type_check
@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs requests; ``jaxinfer/engine/README.md`` explains each option.

    ``max_rows`` is the most requests that decode together. ``page_size`` is the slots of a page, ``pages`` how many
    pages there are, ``memory`` how many bytes they may take (below 1: the share of what is free; None: 0.8 on a TPU or
    a GPU, and 0.3 on a CPU, at most 2 GiB); ``pages`` decides if both are given. ``prefill_chunk`` is the most prompt
    tokens between two windows of decoding, and ``steps_per_look`` the most decoding steps of a window.

    Decoding pauses for new prompts once ``waiting_served_ratio`` times as many requests wait as run, or after
    ``max_waiting_tokens`` steps. ``max_batch_prefill_tokens`` bounds the prompt tokens that are admitted and not yet
    computed (a longer prompt comes beside them, one at a time), ``max_batch_total_tokens`` the prompt and output tokens
    that admitted requests may reach (None: what the pages hold). ``max_waiting`` requests may wait; more are refused.
    ``preemption`` says how a request gives its pages back while it waits, ``prefix_cache`` which pages later prompts
    may share. ``aging_seconds`` is the wait that counts as one step of priority. ``drafting`` says whether windows
    leave out drafts that were seen to lose time.
    """

    max_rows: int = 16
    page_size: int = 64
    pages: int | None = None
    memory: float | None = None
    prefill_chunk: int = 128
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 1
    max_batch_prefill_tokens: int = 4096
    max_batch_total_tokens: int | None = None
    max_waiting: int = 1024
    steps_per_look: int = 8
    preemption: Preemption = "offload"
    prefix_cache: PrefixCache = "exact"
    aging_seconds: float = 10.0
    drafting: Drafting = "auto"

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_waiting_tokens", "max_batch_prefill_tokens", "max_waiting", "steps_per_look"):
            self._whole(name, 1)
        for name in ("pages", "max_batch_total_tokens"):
            if getattr(self, name) is not None:
                self._whole(name, 2)
        for name in ("page_size", "prefill_chunk"):
            self._whole(name, 8)
            if getattr(self, name) & (getattr(self, name) - 1):
                raise InvalidOption(f"engine: {name}={getattr(self, name)!r} is not a power of two")
        for name in ("memory", "waiting_served_ratio", "aging_seconds"):
            value = getattr(self, name)
            if name == "memory" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise InvalidOption(f"engine: {name}={value!r} is not a number above 0")
        choices = {"preemption": ("offload", "recompute"), "prefix_cache": ("exact", "all", "off")}
        for name, known in {**choices, "drafting": ("auto", "always")}.items():
            if getattr(self, name) not in known:
                raise InvalidOption(f"engine: {name}={getattr(self, name)!r} is not one of {', '.join(known)}")

    def _whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidOption(f"engine: {name}={value!r} is not a whole number of {least} or more")


def engine_config(options: dict[str, Any], given: object = None) -> EngineConfig:
    """Return the configuration of options by name, or the one that is given instead; raise InvalidOption for others."""
    if given is not None:
        if options:
            raise InvalidOption(f"engine: give a configuration or options, not both: {', '.join(options)}")
        if not isinstance(given, EngineConfig):
            raise InvalidOption(f"engine: {given!r} is not an EngineConfig")
        return given
    known = [field.name for field in fields(EngineConfig)]
    unknown = next((name for name in options if name not in known), None)
    if unknown is not None:
        raise InvalidOption(f"engine: unknown option {unknown!r}; its options are: {', '.join(known)}")
    return EngineConfig(**options)
