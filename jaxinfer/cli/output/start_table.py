"""Writes for people where the time before the first token went."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxinfer.language_model import LanguageModel


def start_lines(
    model: "LanguageModel", import_seconds: float, prefill_seconds: float, first_token_seconds: float | None
) -> list[str]:
    """Return a line for each part of a command's start, in seconds; ``first_token_seconds`` is where a text streams."""
    load, programs, kept = model.load_times, model.programs.all_sets, model.programs.kept

    def total(name: str) -> int | float:
        return sum(getattr(each.times, name) for each in programs)

    compiled = f"{total('reads')} read, {total('compilations')} compiled"
    if total("compilations"):
        compiled += f" (tracing {total('trace_seconds'):.2f} s, compiling {total('compile_seconds'):.2f} s)"
    rows = [
        ("imports", import_seconds, ()),
        ("opening", load.open_seconds, ()),
        ("tokenizer", load.tokenizer_seconds, ()),
        ("weights", load.weights_seconds, load.notes),
        ("programs", sum(each.compile_seconds for each in programs), (compiled, *(kept.notes if kept else ()))),
        ("prefill", prefill_seconds, ()),
    ]
    if first_token_seconds is not None:
        rows.append(("first token", first_token_seconds, ("after the process began",)))
    width = max(len(name) for name, _, _ in rows)
    lines = [f"{name:<{width}}  {seconds:6.2f}  {'; '.join(notes)}".rstrip() for name, seconds, notes in rows]
    return ["", "start-up, seconds", *lines]
