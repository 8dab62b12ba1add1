"""Reads the prompts that a command works on."""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jaxinfer.errors import InvalidOption

STANDARD_INPUT = "-"


class PromptEntry(NamedTuple):
    """A prompt, and what kind it is where its file tells."""

    text: str
    category: str = ""


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `read_prompts` reads."""
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="text to continue; - reads standard input")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="JSONL file; each line has 'prompt', or 'turns', of which the first is taken; "
        "- reads standard input, where a plain line is a prompt too",
    )


def read_prompts(options: argparse.Namespace) -> list[str]:
    """Return the prompts of the command line, a file or standard input, at least one and none of them empty."""
    if options.prompt is not None and options.prompts is not None:
        raise InvalidOption("a prompt and --prompts were both given: give one of them")
    source = options.prompts
    if source is None and options.prompt != STANDARD_INPUT:
        if options.prompt is None:
            raise InvalidOption('no prompt was given: add "PROMPT", or --prompts FILE.jsonl, or - for standard input')
        if not options.prompt:
            raise InvalidOption("the prompt is empty: give at least one character")
        return [options.prompt]
    return [entry.text for entry in read_entries(STANDARD_INPUT if source is None else source)]


def read_entries(source: str) -> list[PromptEntry]:
    """Return the prompts of a file or standard input with their categories, at least one and none of them empty."""
    if source == STANDARD_INPUT:
        if sys.stdin is None:
            raise InvalidOption("standard input is closed: give a prompt, or --prompts FILE.jsonl")
        return _read_lines("standard input", sys.stdin.buffer, plain_allowed=True)
    with open(source, "rb") as file:
        return _read_lines(source, file, plain_allowed=False)


def _read_lines(origin: str, file: Iterable[bytes], *, plain_allowed: bool) -> list[PromptEntry]:
    """Parse lines; where plain ones are allowed, the first tells which kind they all are."""
    prompts: list[PromptEntry] = []
    is_plain = False
    for number, raw in enumerate(file, 1):
        where = f"{origin}, line {number}"
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip("\r\n")
        except UnicodeDecodeError:
            raise InvalidOption(f"{where}: not UTF-8 text; convert the file to UTF-8") from None
        if not line.strip():
            continue
        if plain_allowed and not prompts:
            is_plain = not line.lstrip().startswith("{")
        prompts.append(PromptEntry(line) if is_plain else _parse(where, line))
    if not prompts:
        raise InvalidOption(f"{origin} holds no prompts: write one a line")
    return prompts


def parse_json(where: str, line: str) -> Any:
    """Return a line's JSON; raise InvalidOption if it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise InvalidOption(f"{where}: not JSON ({reason}); write one JSON object a line") from None


def _parse(where: str, line: str) -> PromptEntry:
    entry = parse_json(where, line)
    prompt = _find_prompt(entry)
    if not isinstance(prompt, str):
        raise InvalidOption(f"{where}: needs a 'prompt' string or a 'turns' list of strings")
    if not prompt:
        raise InvalidOption(f"{where}: the prompt is empty; give at least one character")
    return PromptEntry(prompt, str(entry.get("category", "")))


def _find_prompt(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return None
    if "prompt" in entry:
        return entry["prompt"]
    turns = entry.get("turns")
    return turns[0] if isinstance(turns, list) and turns else None


def read_calibration(options: argparse.Namespace) -> str | None:
    """Return the text of ``--calibration``; raise InvalidOption for a method that reads none."""
    if options.calibration is None:
        return None
    if options.method in ("rtn", "magnitude"):
        raise InvalidOption("--calibration is for --method gptq, awq or sparsegpt: the others read no text")
    return read_text("--calibration", options.calibration)


def read_text(option: str, path: Path) -> str:
    """Return the text of a file that an option names; raise InvalidOption if it is no UTF-8 text, or empty."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidOption(f"{option} {path}: not UTF-8 text; convert the file to UTF-8") from None
    if not text.strip():
        raise InvalidOption(f"{option} {path}: the file is empty")
    return text
