"""Maps a checkpoint's file into memory, so that bytes are read only when needed."""

import mmap
from pathlib import Path

from jaxinfer.errors import CheckpointNotFound, InvalidCheckpoint


def map_file(path: Path) -> mmap.mmap | bytes:
    """Map a file for reading; raises CheckpointNotFound, or InvalidCheckpoint if it cannot be read."""
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
            raise InvalidCheckpoint(f"{path}: cannot be read (not a regular file); give the model's own file")
        with path.open("rb") as file:
            # An empty file cannot be mapped.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if file.seek(0, 2) else b""
    except FileNotFoundError:
        raise CheckpointNotFound(f"{path}: no such file") from None
    except OSError as error:
        raise InvalidCheckpoint(f"{path}: cannot be read ({error.strerror}); give a readable file") from None
