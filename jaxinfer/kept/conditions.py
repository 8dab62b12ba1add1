"""What else decides a program or a conversion, besides what it is asked for: code, versions, settings, processor."""

import functools
import hashlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

_PACKAGES = ("flax", "jaxlib", "llvmlite", "ml_dtypes", "numpy", "gguf")
_SUFFIXES = (".py", ".json")
# The condition that a change of this package itself breaks.
SOURCE = "source files"
# Settings that change no program, and the platform, which the device tells.
_IRRELEVANT = ("cache", "log", "dump", "coordinator", "platform")


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
            if path.suffix in _SUFFIXES:
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
        SOURCE: source_digest(),
        "number of processors": str(_num_processors()),
        "byte order": sys.byteorder,
    }


def compiler_conditions() -> Mapping[str, Any]:
    """Return `conditions`, and what else decides a program."""
    device = jax.devices()[0]
    variables = {name: value for name, value in os.environ.items() if name.startswith(("JAX_", "XLA_", "TF_XLA_"))}
    return {
        **conditions(),
        "environment": {name: value for name, value in variables.items() if _matters(name)},
        "settings of JAX": {name: _setting(name) for name in jax.config.values if _matters(name)},
        "device": f"{device.platform} {device.device_kind} {device.client.platform_version} {jax.device_count()}",
    }


def difference(found: object, expected: Mapping[str, Any]) -> str | None:
    """Say what differs, None where nothing does.

    JAX has more settings once more of its modules are imported: those that only one side knows are as the environment
    gave them, which is compared too.
    """
    if not isinstance(found, Mapping):
        return "its conditions"
    names = [name for name in {**expected, **found} if _differs(name, found.get(name), expected.get(name))]
    return " and ".join(names) or None


def _differs(name: str, found: Any, expected: Any) -> bool:
    if name != "settings of JAX" or not isinstance(found, Mapping):
        return found != expected
    return any(found[setting] != value for setting, value in expected.items() if setting in found)


def _matters(name: str) -> bool:
    return not any(word in name.lower() for word in _IRRELEVANT)


def _setting(name: str) -> str:
    # An attribute knows what a context has set for a while.
    return repr(getattr(jax.config, name, jax.config.values[name]))


def _num_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
