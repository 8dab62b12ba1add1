"""Opens a checkpoint by a path, a known model's name or a hub id."""

import re
from collections.abc import Callable
from os.path import expanduser
from pathlib import Path

from jaxinfer.checkpoint.hf_folder import PICKLE_SUFFIXES, open_hf_folder, refuse_pickle
from jaxinfer.checkpoint.hub import fetch
from jaxinfer.checkpoint.orbax.layout import is_orbax_folder
from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.errors import CheckpointNotFound, InvalidCheckpoint

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_FILE_SUFFIXES = (".gguf", ".safetensors", *PICKLE_SUFFIXES)


def open_checkpoint(
    model: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: Path | None = None,
    notice: Callable[[str], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Checkpoint:
    """Open a Hugging Face or converted folder, a GGUF or llama2.c file, a known model or a hub id; disk comes first.

    ``revision`` and ``token`` are for the hub; ``cache_dir`` stores known models; ``progress`` counts downloaded bytes.
    """
    name = str(model)
    path = _existing(name)
    if path is not None:
        return _open_path(path)
    if isinstance(model, Path) or not _HUB_ID.fullmatch(name) or name.endswith(_FILE_SUFFIXES):
        raise CheckpointNotFound(f"{name!r}: no such file or folder; give a path that exists or a hub id")
    if revision is None and fetch.known_model(name) is not None:
        return _open_path(fetch.fetch(name, cache_dir, notice, progress, token))
    # Imported here: what is there already needs no network.
    from jaxinfer.checkpoint.hub import repository as hub

    return open_hf_folder(hub.fetch_snapshot(name, revision, token, notice=notice, progress=progress))


def _existing(name: str) -> Path | None:
    try:
        path = Path(expanduser(name))
        return path if name and path.exists() else None
    except (OSError, ValueError, RuntimeError):  # a name that no file system allows, or ~ of an unknown user
        return None


def _open_path(path: Path) -> Checkpoint:
    if path.is_dir() and is_orbax_folder(path):
        # Imported here: only a converted folder needs TensorStore.
        from jaxinfer.checkpoint.orbax.folder import open_orbax_folder

        return open_orbax_folder(path)
    if path.is_dir():
        return open_hf_folder(path)
    if path.suffix.lower() == ".gguf":
        # Imported here: other formats need no GGUF reader.
        from jaxinfer.checkpoint.gguf.file import open_gguf

        return open_gguf(path)
    if path.suffix.lower() == ".bin":
        from jaxinfer.checkpoint.llama2c.file import open_llama2c

        return open_llama2c(path)
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise refuse_pickle(path)
    if path.suffix.lower() == ".safetensors":
        raise InvalidCheckpoint(f"{path}: weights without a config.json; give the folder that holds both")
    raise InvalidCheckpoint(
        f"{path}: not a checkpoint; give a Hugging Face folder, a .gguf file or a llama2.c .bin file"
    )
