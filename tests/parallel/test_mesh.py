"""Meshes as people name them."""

import jax
import pytest

from jaxinfer import MeshConfig
from jaxinfer.errors import InvalidOption
from jaxinfer.parallel.mesh import AXES, parse_mesh
from jaxinfer.parallel.partitioner import partitioner_of


def test_a_mesh_reads_as_it_is_written():
    mesh = parse_mesh("tensor=4, pipeline=2")
    assert mesh == MeshConfig(pipeline=2, tensor=4)
    assert (mesh.num_devices, str(mesh)) == (8, "pipeline=2,tensor=4")
    assert parse_mesh(str(mesh)) == mesh


def test_tensor_is_the_axis_of_neighbours():
    devices = list(range(12))
    mesh = MeshConfig(data=2, pipeline=3, tensor=2).build(devices)
    assert mesh.axis_names == AXES
    assert mesh.devices[1, 2, 0, 0].tolist() == [10, 11]


@pytest.mark.parametrize("text", ["", "tensor", "tensor=", "tensor=x", "tensor=-1", "tensor=2,tensor=2", "model=2"])
def test_what_is_no_mesh_is_refused(text):
    with pytest.raises(InvalidOption, match="write axes such as tensor=4,pipeline=2"):
        parse_mesh(text)


@pytest.mark.parametrize("size", [0, -2, True])
def test_an_axis_is_a_whole_number(size):
    with pytest.raises(InvalidOption, match=f"data={size!r} is not a whole number from 1"):
        MeshConfig(data=size)


def test_a_mesh_is_of_all_devices_and_no_more():
    with pytest.raises(InvalidOption, match="mesh tensor=7 is of 7 devices, but there are 1: choose axes"):
        MeshConfig(tensor=7).build(jax.devices()[:1])


def test_a_mesh_of_jaxs_own_making_is_taken():
    """`jax.make_mesh` gives axes that a program would have to name at every step."""
    mesh = jax.make_mesh((1, 1, 1, 1, 1), AXES)
    partitioner = partitioner_of(mesh)
    assert partitioner.mesh is not None
    assert set(partitioner.mesh.axis_types) == {jax.sharding.AxisType.Auto}
    # One of before there were experts.
    older = partitioner_of(jax.make_mesh((1, 1, 1, 1), ("data", "pipeline", "sequence", "tensor"))).mesh
    assert older == partitioner.mesh
    with pytest.raises(InvalidOption, match="its axes are x"):
        partitioner_of(jax.make_mesh((1,), ("x",)))
