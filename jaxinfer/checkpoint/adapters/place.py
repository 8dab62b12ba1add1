"""Where an adapter is: a folder here, or one of a repository on the hub, which is then fetched."""

import re
from collections.abc import Callable
from pathlib import Path

from jaxinfer.checkpoint.adapters.peft_folder import WEIGHTS
from jaxinfer.checkpoint.adapters.settings import CONFIG
from jaxinfer.errors import CheckpointNotFound, InvalidOption, shown

# A repository, a folder in it, and a branch, tag or commit; a name of dots alone would lead out of it.
_PART = r"(?!\.+(?:/|@|$))[\w.-]+"
_ON_HUB = re.compile(rf"(?P<id>[A-Za-z0-9][\w.-]*/{_PART})(?P<folder>(?:/{_PART})*)(?:@(?P<revision>[^@\s]+))?")


def adapter_folder(
    where: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    notice: Callable[[str], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Return the folder of an adapter: a path, or ``owner/name``, ``owner/name/folder``, either with ``@revision``.

    What is here comes first. ``revision`` and ``token`` are for the hub. Raises InvalidOption for what is neither, and
    as `jaxinfer.checkpoint.hub.repository.fetch_snapshot` does.
    """
    if not isinstance(where, str | Path) or not str(where):
        raise InvalidOption(f"adapter {shown(where)} is no path of a folder, and no hub id")
    if (path := _existing(where)) is not None:
        if revision is not None:
            raise InvalidOption(f"adapter {where}: a folder has no revision {revision!r}: leave it out")
        return path
    place = _ON_HUB.fullmatch(where) if isinstance(where, str) else None
    if place is None:
        raise CheckpointNotFound(f"{shown(where)}: no such folder: give one that PEFT saved an adapter in, or a hub id")
    if place["revision"] is not None and revision not in (None, place["revision"]):
        raise InvalidOption(f"adapter {where}: it names a revision, and revision={revision!r} another: give one")
    # Imported here: what is there already needs no network.
    from jaxinfer.checkpoint.hub.repository import fetch_snapshot

    folder = place["folder"].removeprefix("/")
    wanted = [f"{folder}/{name}" if folder else name for name in (CONFIG, WEIGHTS)]
    asked = {"token": token, "wanted": wanted, "notice": notice, "progress": progress}
    return fetch_snapshot(place["id"], place["revision"] or revision, **asked) / folder


def _existing(where: str | Path) -> Path | None:
    try:
        path = Path(where).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # a name that no file system allows, or ~ of an unknown user
        return None
