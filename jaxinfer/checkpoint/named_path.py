"""Paths that users write in options."""

from os.path import expanduser
from pathlib import Path

from jaxinfer.errors import InvalidOption


def named_path(name: str) -> Path:
    """Return the path of a name, whether or not anything is there; raise InvalidOption for one that cannot be."""
    try:
        path = Path(expanduser(name))
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, or ~ of an unknown user
        raise InvalidOption(f"{name}: no path ({getattr(error, 'strerror', None) or error})") from None
    return path
