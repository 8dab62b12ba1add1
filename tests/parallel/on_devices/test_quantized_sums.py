"""Sums over devices in bytes: what they are off by, that a row's bits are its own, and a model's logits."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jaxinfer
from jaxinfer.errors import InvalidOption
from jaxinfer.ops.quantized_sums import added_in_bytes
from tests.parallel.on_devices.meshes import on_mesh
from tests.toys import write_tiny_llama


def test_each_number_is_off_by_half_a_step_of_each_part_and_of_the_sum():
    """Blocks of very different sizes do not disturb each other; rows depend on themselves alone."""
    devices = 4
    mesh = Mesh(np.array(jax.devices()[:devices]), ("tensor",))
    sizes = np.repeat(10.0 ** np.arange(8), 128)
    parts = np.asarray(jax.random.normal(jax.random.key(0), (devices, 3, 1024)) * sizes, np.float32)
    run = jax.jit(
        jax.shard_map(
            lambda part: added_in_bytes(part[0], "tensor", devices)[None],
            mesh=mesh,
            in_specs=PartitionSpec("tensor"),
            out_specs=PartitionSpec("tensor"),
            check_vma=False,
        )
    )
    found, exact = np.asarray(run(parts)), parts.astype(np.float64).sum(0)
    assert all((each == found[0]).all() for each in found)
    most = np.abs(parts).reshape(devices, 3, 8, 128).max(-1).sum(0) + np.abs(exact).reshape(3, 8, 128).max(-1)
    steps = np.repeat(most / 127, 128, axis=-1)
    assert (np.abs(found[0] - exact) <= 0.51 * steps).all()
    assert np.abs(found[0] - exact).max() > 0
    others = parts.copy()
    others[:, 0] = 3e9
    np.testing.assert_array_equal(np.asarray(run(others))[:, 1:], found[:, 1:])


@pytest.mark.parametrize(
    "weights",
    [pytest.param(None, marks=pytest.mark.exhaustive), pytest.param("int4:group=32", marks=pytest.mark.slow)],
)
def test_logits_are_near_those_without(tmp_path, weights):
    folder = write_tiny_llama(tmp_path, model_dim=256, ffn_dim=256, num_heads=4, num_kv_heads=4, head_dim=32)
    one = jaxinfer.load(folder, weights=weights)
    texts = [[5, 6, 7, 8], [9, 3, 2, 7]]
    plain, rounded = (np.asarray(on_mesh(one, "tensor=2", collectives=name).logits(texts)) for name in (None, "int8"))
    assert 0 < np.abs(rounded - plain).max() < 0.1 * plain.std()


def test_unknown_collectives_are_refused(tmp_path):
    with pytest.raises(InvalidOption, match="unknown collectives 'int4'; use int8, or none"):
        jaxinfer.load(tmp_path, collectives="int4")
