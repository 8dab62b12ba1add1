"""Texts that a trainer is given."""

import json
from pathlib import Path

from tests.toys import BEGIN, encode_bytes, fable


def write_fables(folder: Path) -> Path:
    """Write a file of answers, each a line of a fable."""
    path = folder / "texts.jsonl"
    lines = [
        {"prompt_tokens": [BEGIN], "tokens": list(encode_bytes(line + "\n"))} for line in fable(60, 7).splitlines()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
