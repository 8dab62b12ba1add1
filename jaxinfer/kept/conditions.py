"""What else decides a program or a conversion, besides what it is asked for: code, versions, settings, processor."""

import functools
import hashlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

import jax

_PACKAGES = ("flax", "jaxlib", "llvmlite", "ml_dtypes", "numpy", "gguf")
_SOURCES = (".py", ".json")
# Where things are kept changes none of them.
_IRRELEVANT = ("cache", "log", "dump", "coordinator")


@functools.cache
def processor_fingerprint() -> str:
    """Return a few letters that stand for the processor and its features."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = [f"flags: {platform.processor()}"]
    facts = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def machine() -> str:
    """Return which JAX runs on which kind of machine: a home may be shared by machines that differ."""
    return f"jax-{jax.__version__}-{platform.machine()}-{processor_fingerprint()}"


@functools.cache
def source_digest() -> str:
    """Return letters that stand for this package's own code and tables, and the kernels' beside it."""
    package = Path(__file__).parents[1]
    found = hashlib.sha256()
    for folder in (package, package.parent / "pallas_kernels"):
        for path in sorted(folder.rglob("*")):
            if path.suffix in _SOURCES:
                found.update(f"{path.relative_to(folder.parent)}\n".encode())
                found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:40]


def conditions() -> Mapping[str, str]:
    """Return each condition by what a person would call it; all are to be equal."""
    versions = [f"python {platform.python_version()}"]
    versions += [f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES]
    return {
        "machine": machine(),
        "versions": ", ".join(versions),
        "source files": source_digest(),
        "number of processors": str(_num_processors()),
        "byte order": sys.byteorder,
    }


def compiler_conditions() -> Mapping[str, str]:
    """Return `conditions`, and what else decides a program."""
    device = jax.devices()[0]
    flags = {name: value for name, value in os.environ.items() if name.startswith(("XLA_", "TF_XLA_"))}
    settings = {name: _setting(name) for name in jax.config.values if not any(word in name for word in _IRRELEVANT)}
    return {
        **conditions(),
        "XLA flags": repr(sorted(flags.items())),
        "settings of JAX": hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest(),
        "device": f"{device.platform} {device.device_kind} {device.client.platform_version} {jax.device_count()}",
    }


def difference(found: object, expected: Mapping[str, str]) -> str | None:
    """Say what differs, None where nothing does."""
    if not isinstance(found, Mapping):
        return "its conditions"
    names = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
    return " and ".join(names) or None


def _setting(name: str) -> str:
    # An attribute knows what a context has set for a while.
    return repr(getattr(jax.config, name, jax.config.values[name]))


def _num_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
