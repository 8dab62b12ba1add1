"""A converted folder loads onto a mesh, each device holding its part."""

import subprocess
import sys

import pytest

from jaxinfer.checkpoint.convert import convert

CHILD = """
import sys
import jax, numpy as np
from jax.sharding import AxisType, Mesh
from jaxinfer.checkpoint.load import load_params
from jaxinfer.checkpoint.open import open_checkpoint
from jaxinfer.models.decoder import abstract_params
from jaxinfer.models.families.registry import family_of
from jaxinfer.ops.backend import choose_backend
from jaxinfer.parallel.rules import parameter_shardings

backend = choose_backend("bfloat16", scan_layers=True)
mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,))
sources = [open_checkpoint(path) for path in sys.argv[1:]]
family = family_of(sources[0].config)
config = family.translate(sources[0].config)
described = abstract_params(config, backend)
shardings = parameter_shardings(config, backend, mesh)
place = lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)
names = family.tensor_names(config)
whole = load_params(sources[0], names, described)
parts = load_params(sources[1], names, jax.tree.map(place, described, shardings))
jax.tree.map(np.testing.assert_array_equal, whole, parts)
kernel = parts["blocks"]["attention"]["query"]["kernel"]
print(len(kernel.addressable_shards), kernel.addressable_shards[0].data.shape, kernel.shape)
"""


@pytest.mark.slow
def test_a_converted_folder_loads_onto_two_devices_and_another_dtype(tiny_llama_folder, tmp_path):
    source = tiny_llama_folder()
    made = convert(source, tmp_path / "made")
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(source), str(made)], env=environment, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == ["2", "(2,", "16,", "32)", "(2,", "32,", "32)"]
