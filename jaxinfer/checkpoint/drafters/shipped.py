"""What heads and streams share on disk: those that come with the package, whose weights they are for, their tree."""

import json
from collections.abc import Callable
from pathlib import Path

from jaxinfer.errors import InvalidCheckpoint, InvalidOption

# The draft tree that suits drafters, where one stands in their folder.
TREE = "tree.json"
# A folder for each model, with a folder of each kind of drafter that it has.
DRAFTERS = Path(__file__).resolve().parents[2] / "drafters"


def shipped_folder(kind: str, fingerprint: Callable[[], str | None], train: str) -> Path:
    """Return the folder of drafters of a kind, ``heads`` or ``streams``, for the weights of a fingerprint.

    Raises InvalidOption where none come for these; ``train`` is the command that makes some.
    """
    for description in sorted(DRAFTERS.glob(f"*/{kind}/{kind}.json")):
        if json.loads(description.read_bytes())["base_fingerprint"] == fingerprint():
            return description.parent
    raise InvalidOption(
        f"no {kind} come with the package for these weights ({fingerprint() or 'unknown'}): name a folder, "
        f"heads=FOLDER, or make some with {train}"
    )


def tree_beside(folder: Path | None) -> Path | None:
    """Return the file of the draft tree that comes with the drafters of a folder, if one does."""
    path = None if folder is None else folder / TREE
    return path if path is not None and path.is_file() else None


def check_fingerprint(folder: Path, of: str | None, found: Callable[[], str | None]) -> None:
    """Raise InvalidCheckpoint where drafters are known to be for other weights than a model's."""
    if of is None:
        return
    weights = found()
    if weights is not None and weights != of:
        raise InvalidCheckpoint(
            f"{folder}: is for the weights {of}, but this model's are {weights}: load the model that it was trained on"
        )
