"""What all tests share: strict array shapes, one compilation cache a run, and models that are made once."""

import ctypes
import fcntl
import gc
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxinfer.decoding.live_programs import LIVE
from jaxinfer.language_model import LanguageModel
from jaxinfer.model_loading import load
from tests.toys import write_tiny_llama, write_trained_llama

# Where tests compile many programs whose meaning is what is tested, not how fast or how exactly they compute it.
QUICK = (
    "bench",
    "cache",
    "checkpoint",
    "cli",
    "colab",
    "decoding",
    "engine",
    "grammar",
    "models",
    "parallel",
    "sampling",
    "server",
    "train",
    "test_bad_input.py",
    "test_language_model.py",
)
# Programs are freed in a worker that holds this many bytes, and again once it has grown by so many: what is needed
# again is then read again, so freeing all the time would cost more than it gives.
MUCH_MEMORY = 5 * 2**28
MUCH_GROWTH = 5 * 2**26
# JAX's own name of the folder of compiled programs.
CACHE = "JAX_COMPILATION_CACHE_DIR"
# Of the C library's ``mallopt``.
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8
# What a worker held when its programs were freed last.
FREED = pytest.StashKey[int]()
# The file of the test before.
LAST = pytest.StashKey[Path]()
# The files that take minutes, first, so that no worker is left alone with one at the end; and those that load the
# default model, while workers hold little.
LONG = (
    "test_on_devices.py",
    "test_exactness.py",
    "test_golden.py",
    "test_shipped.py",
    "test_law.py",
    "test_parity.py",
    "test_strategies_compile.py",
    "test_long_texts.py",
    "test_eight_chips.py",
    "test_plan.py",
    "test_tpu_steps.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Let both daily runs compile a program in one part: parts for many threads cost a tenth more on two cores.

    On an older JAX they also do without XLA's fusion emitters, which double the time of compiling. Full products
    (``-m exhaustive``) compile as users do.

    Compiled programs are kept for this run, by all its workers, unless JAX's own variable names a folder.
    """
    if CACHE not in os.environ:
        # Workers are started later, with the variables of this process.
        os.environ[CACHE] = folder = tempfile.mkdtemp(prefix="jaxinfer-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    if sys.platform == "linux":
        # Few heaps, and arrays outside of them: what is freed goes back to the system.
        libc = ctypes.CDLL(None)
        libc.mallopt(_ARENA_MAX, 2)
        libc.mallopt(_MMAP_THRESHOLD, 2**18)
    if config.getoption("markexpr") != "exhaustive":
        given = os.environ.get("XLA_FLAGS", "")
        chosen = ["--xla_cpu_parallel_codegen_split_count=1"]
        chosen += ["--xla_cpu_use_fusion_emitters=false"] * (jax.__version_info__ < (0, 11))
        added = [flag for flag in chosen if flag.partition("=")[0] not in given]
        os.environ["XLA_FLAGS"] = " ".join([given, *added]).strip()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the long files; refuse a test of two runs, which the cheaper one would run too."""
    if both := [item.nodeid for item in items if {"slow", "exhaustive"} <= {mark.name for mark in item.iter_markers()}]:
        raise pytest.UsageError(f"marked slow and exhaustive: {', '.join(both)}")
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


def pytest_collection_finish() -> None:
    """Keep what was imported out of the collector's sight, and let it look less often: it took a fifteenth of a run."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Choose how a test's programs, and those of the processes that it starts, are compiled, before any is.

    Without most optimisations they mean the same, and are ready sooner. A TPU's programs, full products and the real
    model's texts are compiled as for users.
    """
    _free_programs(item)
    marked = {mark.name for mark in item.iter_markers()} & {"tpu_compile", "exhaustive", "optimised"}
    quick = not marked and bool(set(QUICK) & set(item.path.relative_to(item.config.rootpath).parts))
    jax.config.update("jax_disable_most_optimizations", quick)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(quick)


def _free_programs(item: pytest.Item) -> None:
    """Free programs once a worker holds much: without this it grows to several gigabytes.

    Before a test and not after one, which holds its fixtures, models among them, until it has been reported.
    """
    stash = item.session.stash
    last, stash[LAST] = stash.get(LAST, item.path), item.path
    if sys.platform != "linux":
        return
    held, is_between_files = _resident_bytes(), last != item.path
    is_much = held > MUCH_MEMORY and is_between_files
    if is_much or held > max(MUCH_MEMORY, stash.get(FREED, 0) + MUCH_GROWTH):
        if is_between_files:
            # Of the models that all files share; within a file tests may count programs.
            LIVE.clear()
        for _ in range(10):
            # JAX goes through its caches while threads of an engine that all tests of a file share may add to them.
            with suppress(RuntimeError):
                jax.clear_caches()
                break
            time.sleep(0.1)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        stash[FREED] = _resident_bytes()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.fixture(scope="session", autouse=True)
def compilation_cache() -> Iterator[None]:
    """Compile equal programs once a run.

    The variables are set too: commands that run within a test leave the folder as it is, and child processes share it.
    """
    jax.config.update("jax_compilation_cache_dir", os.environ[CACHE])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(scope="session")
def tiny_llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes a random llama with changed `DecoderConfig` fields, once for each choice."""
    made: dict[Any, Path] = {}

    def write(seed: int = 0, **changes: Any) -> Path:
        key = (seed, tuple(sorted(changes.items())))
        if key not in made:
            made[key] = write_tiny_llama(tmp_path_factory.mktemp("llama"), seed, **changes)
        return made[key]

    return write


@pytest.fixture(scope="session")
def trained_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint that was trained on a small text in this run, by the first worker that asks for it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return write_trained_llama(tmp_path_factory.mktemp("trained"))
    folder = tmp_path_factory.getbasetemp().parent / "trained"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            write_trained_llama(tmp_path_factory.mktemp("trained") / "model").rename(folder)
    return folder


@pytest.fixture(scope="session")
def trained_model(trained_folder: Path) -> LanguageModel:
    """Return it loaded, with the programs that the tests of a run share."""
    return load(trained_folder)
