"""Sets up JAX for a command: a persistent compilation cache, and no TPU warnings on machines without one."""

import contextlib
import importlib.util
import os
import re
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxinfer.kept.conditions import machine

_CACHE_WARNING = re.compile(r"Error (?:reading|writing) persistent compilation cache entry for '([\w.-]+)'")


def prepare_jax() -> None:
    """Choose the platform and turn on the compilation cache, unless the user has set them."""
    if not os.environ.get("JAX_PLATFORMS") and lacks_tpu() and not has_other_accelerator():
        # Otherwise JAX first tries libtpu, which without a TPU takes a second and prints errors.
        jax.config.update("jax_platforms", "cpu")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        with contextlib.suppress(RuntimeError):  # a user without a home folder
            use_compilation_cache(default_cache_folder(Path.home()))


def kept_folder() -> Path | None:
    """Return where commands keep converted weights and compiled programs; None where JAX's own cache was moved."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return None
    try:
        return Path.home() / ".cache" / "jaxinfer" / "kept"
    except RuntimeError:  # a user without a home
        return None


def lacks_tpu(devices: Path = Path("/dev")) -> bool:
    """Tell whether libtpu is installed on a machine whose kernel shows no TPU."""
    found = [*devices.glob("accel*"), *devices.glob("vfio/[0-9]*")]
    return importlib.util.find_spec("libtpu") is not None and not found


def has_other_accelerator() -> bool:
    """Tell whether a plugin for another device is installed."""
    return importlib.util.find_spec("jax_plugins") is not None


def default_cache_folder(home: Path) -> Path:
    """Return the folder of this JAX on this kind of machine: a home may be shared by machines that differ."""
    return home / ".cache" / "jaxinfer" / "xla" / machine()


def use_compilation_cache(folder: Path) -> None:
    """Keep compiled programs in ``folder``; silently replace damaged entries by compiling again."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # the home folder is not writable: work without a cache
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    for name, value in (("min_compile_time_secs", 0), ("min_entry_size_bytes", -1)):
        if f"JAX_PERSISTENT_CACHE_{name.upper()}" not in os.environ:
            jax.config.update(f"jax_persistent_cache_{name}", value)
    shown = warnings.showwarning

    def show(message: Any, category: type[Warning], *place: Any, **more: Any) -> None:
        found = _CACHE_WARNING.match(str(message))
        if found is None:
            shown(message, category, *place, **more)
            return
        # JAX does not overwrite an entry, so the damaged one is deleted first.
        for entry in folder.glob(f"{found[1]}-*-cache"):
            entry.unlink(missing_ok=True)

    warnings.filterwarnings("always", message="Error .* persistent compilation cache entry")
    warnings.showwarning = show


class _Users:
    """Counts who does without JAX's cache, and remembers how it was before the first of them."""

    lock = threading.Lock()
    count = 0
    was_enabled = True


@contextlib.contextmanager
def without_persistent_cache() -> Iterator[None]:
    """Compile afresh, and write to JAX's cache nothing of it; several threads may at once."""
    _change_users(1)
    try:
        yield
    finally:
        _change_users(-1)


def _change_users(change: int) -> None:
    with _Users.lock:
        if not _Users.count:
            _Users.was_enabled = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
        _Users.count += change
        jax.config.update("jax_enable_compilation_cache", _Users.was_enabled and not _Users.count)
        # JAX looks at the setting once and remembers the answer.
        compilation_cache.reset_cache()
