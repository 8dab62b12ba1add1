"""The facts of each TPU, held to the compiler's own and to each other."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.planning.topology import tensor_mesh, without_persistent_cache
from pallas_kernels.chips import CHIPS


def test_the_facts_need_no_jax():
    program = "import sys, pallas_kernels.chips; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("chip", [chip for chip in CHIPS.values() if chip.clock_hz], ids=lambda chip: chip.name)
def test_the_clock_brings_the_matrix_units_to_the_published_peak(chip):
    """These chips have four units a core, each of which multiplies and adds size x size numbers a cycle."""
    operations_a_cycle = chip.cores * 4 * 2 * chip.mxu_size**2
    assert operations_a_cycle * chip.clock_hz == pytest.approx(chip.bf16_peak, rel=0.01)


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    "chip",
    [pytest.param(chip, id=name, marks=() if name == "v5e" else pytest.mark.slow) for name, chip in CHIPS.items()],
)
def test_devices_and_memory_are_what_the_compiler_says(chip):
    mesh = tensor_mesh(f"{chip.name}:{chip.single}", chip.devices)
    too_large = jax.ShapeDtypeStruct((1 << 40,), jnp.int8, sharding=NamedSharding(mesh, PartitionSpec()))
    with without_persistent_cache(), pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as caught:
        jax.jit(lambda numbers: numbers + 1).trace(too_large).lower(lowering_platforms=("tpu",)).compile()
    available = re.search(r"available HBM \(([\d.]+)G\)", str(caught.value))
    assert available is not None
    assert chip.device_hbm_bytes / 2**30 == pytest.approx(float(available[1]), abs=0.02)
