"""Finds the real models and texts that some tests use; they are not part of the repository."""

from pathlib import Path

import pytest

_CANDIDATES = (
    Path(__file__).resolve().parents[2] / "shared" / "data",
    Path(__file__).resolve().parents[1] / "shared" / "data",
)


def shared_data(relative: str) -> Path:
    """Return the path of a shared data file, or skip the calling test where the data is absent."""
    for folder in _CANDIDATES:
        if (folder / relative).exists():
            return folder / relative
    pytest.skip(f"shared data absent: {relative}")
