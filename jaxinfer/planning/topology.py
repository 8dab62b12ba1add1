"""TPUs that are not here: their devices as the TPU compiler describes them."""

import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from jaxinfer.errors import InvalidOption
from jaxinfer.parallel.mesh import AXES
from pallas_kernels.chips import CHIPS, Chip

# libtpu looks for the machine that it runs on, and locks it: neither is wanted where there is none.
_LIBTPU_ENVIRONMENT = {
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def chip_of(topology: str) -> Chip:
    """Return the chip that a topology such as ``v5e:2x4`` is made of."""
    chip = CHIPS.get(topology.partition(":")[0])
    if chip is None:
        known = ", ".join(CHIPS)
        raise InvalidOption(f"unknown TPU topology {topology!r}: write a chip ({known}) and a shape, such as v5e:2x4")
    return chip


def tensor_mesh(topology: str, tensor: int) -> Mesh:
    """Return a mesh of all devices of a TPU topology along one axis, which ``tensor`` must be the length of."""
    chip = chip_of(topology)
    if importlib.util.find_spec("libtpu") is None:
        raise InvalidOption('compiling for a TPU needs libtpu: pip install "jaxinfer[tpu]"')
    options: dict[str, Any] = {}
    if topology == f"{chip.name}:{chip.single}":
        options["chips_per_host_bounds"] = (1, 1, 1)
    if chip.cores > chip.devices:
        options["chip_config_name"] = "megacore"
    try:
        with _environment(_LIBTPU_ENVIRONMENT):
            described = topologies.get_topology_desc(topology, platform="tpu", **options)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidOption(f"no TPU topology {topology!r}; write a shape such as v5e:2x4 ({reason})") from error
    count = len(described.devices)
    if count != tensor:
        raise InvalidOption(f"{topology} has {count} devices, not {tensor}: use tensor={count} or another topology")
    return topologies.make_mesh(described, (1, 1, 1, tensor), AXES)


@contextmanager
def without_persistent_cache() -> Iterator[None]:
    """Compile afresh: JAX writes what it compiles for absent devices to its cache, and then fails to read it."""
    before = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_enable_compilation_cache", False)
    # JAX looks at the setting once and remembers the answer.
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that are not set yet, for a while."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
