"""JAX is set up quietly: no TPU is looked for where none is, and a cache that cannot be written is done without."""

from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxinfer import jax_setup
from jaxinfer.planning.topology import without_persistent_cache

_CACHE_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.mark.parametrize(
    ("device", "libtpu", "expected"),
    [
        (None, True, True),
        (None, False, False),
        ("accel0", True, False),
        ("vfio/0", True, False),
        ("vfio/vfio", True, True),
    ],
)
def test_a_tpu_is_missed_only_where_its_library_is_and_its_device_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str | None, libtpu: bool, expected: bool
) -> None:
    monkeypatch.setattr(jax_setup.importlib.util, "find_spec", lambda name: object() if libtpu else None)
    if device is not None:
        (tmp_path / device).parent.mkdir(exist_ok=True)
        (tmp_path / device).touch()
    assert jax_setup.lacks_tpu(tmp_path) is expected


def test_the_cache_folder_is_of_one_jax_and_one_machine(tmp_path: Path) -> None:
    folder = jax_setup.default_cache_folder(tmp_path)
    assert folder == jax_setup.default_cache_folder(tmp_path)
    assert folder.parent == tmp_path / ".cache" / "jaxinfer" / "xla"
    assert jax.__version__ in folder.name


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    before = jax.config.jax_compilation_cache_dir
    (tmp_path / "file").touch()
    jax_setup.use_compilation_cache(tmp_path / "file" / "cache")
    assert jax.config.jax_compilation_cache_dir == before


def test_a_measured_compilation_leaves_the_cache_alone(tmp_path: Path) -> None:
    """Compiling outside the context writes an entry, compiling inside it writes and reads none."""
    before = {name: getattr(jax.config, name) for name in _CACHE_SETTINGS}
    try:
        jax_setup.use_compilation_cache(tmp_path)
        compilation_cache.reset_cache()
        with without_persistent_cache():
            jax.jit(lambda number: number * 3)(2.0)
        assert not list(tmp_path.iterdir())
        jax.jit(lambda number: number * 5)(2.0)
        assert list(tmp_path.iterdir())
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
