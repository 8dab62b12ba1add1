"""What drafters share on disk: drafters that come with the package, their fingerprints and their trees."""

import json
from collections.abc import Callable
from pathlib import Path

from jaxinfer.errors import InvalidCheckpoint, InvalidOption

# The draft tree of a folder's drafters, if the folder has one.
TREE = "tree.json"
# One folder per model, with one folder for each kind of drafter.
DRAFTERS = Path(__file__).resolve().parents[2] / "drafters"
# The files of each kind: the description, which names the base's fingerprint, and the weights.
FILES = {
    "heads": ("heads.json", "heads.safetensors"),
    "streams": ("streams.json", "streams.safetensors"),
    "eagle": ("config.json", "model.safetensors"),
}
_TITLES = {"eagle": "EAGLE drafters"}


def shipped_folder(kind: str, fingerprint: Callable[[], str | None], train: str) -> Path:
    """Return the folder of shipped drafters for the weights of a fingerprint.

    ``kind`` is one of `FILES`. Raises InvalidOption if there are none; ``train`` is the command that trains them.
    """
    if (folder := _shipped(kind, fingerprint)) is not None:
        return folder
    raise InvalidOption(
        f"no {_TITLES.get(kind, kind)} come with the package for these weights ({fingerprint() or 'unknown'}): name a "
        f"folder, heads=FOLDER, or train them with {train}"
    )


def is_shipped(kind: str, fingerprint: Callable[[], str | None]) -> bool:
    """Tell whether `shipped_folder` has one."""
    return _shipped(kind, fingerprint) is not None


def _shipped(kind: str, fingerprint: Callable[[], str | None]) -> Path | None:
    for description in sorted(DRAFTERS.glob(f"*/{kind}/{FILES[kind][0]}")):
        if json.loads(description.read_bytes())["base_fingerprint"] == fingerprint():
            return description.parent
    return None


def tree_beside(folder: Path | None) -> Path | None:
    """Return the draft tree's file in a folder of drafters, if there is one."""
    path = None if folder is None else folder / TREE
    return path if path is not None and path.is_file() else None


def check_fingerprint(folder: Path, of: str | None, found: Callable[[], str | None]) -> None:
    """Raise InvalidCheckpoint if drafters were trained on weights other than the model's."""
    if of is None:
        return
    weights = found()
    if weights is not None and weights != of:
        raise InvalidCheckpoint(
            f"{folder}: is for the weights {of}, but this model's are {weights}: load the model that it was trained on"
        )
