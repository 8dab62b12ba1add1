"""JAX is set up quietly: no TPU is looked for where none is, and a cache that cannot be written is done without."""

from pathlib import Path

import jax
import pytest

from jaxinfer.cli import jax_setup


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


def test_a_measured_compilation_is_not_read_from_the_cache() -> None:
    before = jax.config.jax_enable_compilation_cache
    with jax_setup.without_compilation_cache():
        assert jax.config.jax_enable_compilation_cache is False
    assert jax.config.jax_enable_compilation_cache is before
