"""The file that a chart is drawn to; drawing needs matplotlib, which is optional."""

import importlib.util
import os
from pathlib import Path
from typing import Any

from jaxinfer.errors import InvalidOption

_FORMATS = (".png", ".svg")


def check_chart(path: Path, option: str = "--chart") -> None:
    """Refuse a chart that could not be written, before anything is measured; ``option`` is what asks for it."""
    if path.suffix.lower() not in _FORMATS:
        raise InvalidOption(f"{option} {path}: the chart is a PNG or SVG file; let its name end in .png or .svg")
    if path.is_dir() or (path.parent.is_dir() and not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise InvalidOption(f"{option} {path}: cannot be written; name another file")
    if not path.parent.is_dir():
        raise InvalidOption(f"{option} {path}: there is no folder {path.parent}; make it first")
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidOption(f'{option} needs matplotlib: pip install "jaxinfer[bench]" or leave {option} out')


def save_chart(figure: Any, path: Path) -> None:
    """Write a matplotlib figure in the format that the path's ending names; equal figures give equal SVG files."""
    from matplotlib import rc_context

    kind = path.suffix.lower().removeprefix(".")
    # An SVG file would hold the date and random names, and so would differ each time in a repository.
    with rc_context({"svg.hashsalt": "jaxinfer"}):
        figure.savefig(path, format=kind, dpi=120, metadata={"Date": None} if kind == "svg" else None)
