"""Writes the statistics of results for people."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxinfer.bench.columns import align

if TYPE_CHECKING:
    from jaxinfer.results import GenerationStats

_COLUMNS = (
    ("prompt tokens", "prompt_tokens", "{:d}"),
    ("new tokens", "new_tokens", "{:d}"),
    ("steps", "steps", "{:d}"),
    ("target passes", "target_passes", "{:.1f}"),
    ("tokens/step", "tokens_per_step", "{:.2f}"),
    ("drafted", "drafted", "{:d}"),
    ("accepted", "accepted", "{:d}"),
    ("by depth", "accepted_by_depth", "{}"),
    ("prefill s", "prefill_seconds", "{:.3f}"),
    ("decode s", "decode_seconds", "{:.3f}"),
    ("compile s", "compile_seconds", "{:.2f}"),
    ("tokens/s", "tokens_per_second", "{:.1f}"),
    ("seed", "seed", "{:d}"),
)
# Where a draft model has devices of its own.
_AHEAD = (("drafted ahead", "drafted_ahead", "{:d}"),)
# Where there are stages of a pipeline, which idle for this part of a pass.
_BUBBLES = (("prefill bubble", "prefill_bubble", "{:.0%}"), ("decode bubble", "decode_bubble", "{:.0%}"))


def stats_lines(stats: Sequence["GenerationStats"]) -> list[str]:
    """Return one result's statistics as a list, those of several as a table with a row each."""
    columns = _COLUMNS + (_AHEAD if any(one.drafted_ahead for one in stats) else ())
    columns += _BUBBLES if any(one.decode_bubble for one in stats) else ()
    cells = [[_format(one, name, form) for _, name, form in columns] for one in stats]
    titles = [title for title, _, _ in columns]
    if len(cells) == 1:
        width = max(map(len, titles))
        return ["", *(f"{title:<{width}}  {cell}" for title, cell in zip(titles, cells[0]))]
    return ["", *align(["", *titles], [[f"[{number}]", *row] for number, row in enumerate(cells, 1)], num_left=1)]


def _format(stats: "GenerationStats", name: str, form: str) -> str:
    value = getattr(stats, name)
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "-"
    return form.format(value)
