"""How parameters are split over a mesh."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import DecoderConfig, LayerKind, Rope
from jaxinfer.models.decoder import abstract_params, create_cache
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.logical_axes import filled_rows, split_rows
from jaxinfer.parallel.mesh import MeshConfig
from jaxinfer.parallel.rules import batch_shardings, check_split, parameter_shardings

CONFIG = DecoderConfig(
    family="llama",
    vocab_size=96,
    num_layers=2,
    model_dim=16,
    ffn_dim=40,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=64,
    norm_eps=1e-5,
    layer_pattern=(LayerKind(Rope(1e4, 8)),),
)


def test_heads_features_and_vocabulary_are_split_and_the_rest_is_on_every_device():
    mesh = MeshConfig().build(jax.devices()[:1])
    backend = choose_backend("float32", platform="tpu")
    shardings = parameter_shardings(CONFIG, backend, mesh)
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
    block = specs["blocks"]
    split_rows, split_columns = PartitionSpec(None, "tensor", None), PartitionSpec(None, None, "tensor")
    assert all(block["attention"][name]["kernel"] == split_rows for name in ("query", "key", "value"))
    assert all(block["mlp"][name]["kernel"] == split_rows for name in ("gate", "up"))
    assert block["attention"]["output"]["kernel"] == split_columns
    assert block["mlp"]["down"]["kernel"] == split_columns
    assert specs["embed"]["embedding"] == specs["head"]["kernel"] == PartitionSpec("tensor", None)
    assert specs["final_norm"]["scale"] == PartitionSpec(None)
    assert jax.tree.structure(shardings) == jax.tree.structure(abstract_params(CONFIG, backend))


def test_stages_have_their_own_layers():
    mesh, backend = MeshConfig().build(jax.devices()[:1]), choose_backend("float32", platform="tpu")
    shardings = parameter_shardings(CONFIG, replace(backend, stages=2), mesh)
    assert shardings["blocks"]["mlp"]["up"]["kernel"].spec == PartitionSpec("pipeline", "tensor", None)
    assert shardings["embed"]["embedding"].spec == PartitionSpec("tensor", None)


def test_a_decoder_that_splits_evenly_passes():
    check_split(CONFIG, 2)


@pytest.mark.parametrize(("tensor", "named"), [(3, "4 attention heads"), (4, "2 key/value heads")])
def test_what_does_not_split_evenly_is_named(tensor, named):
    with pytest.raises(InvalidOption, match=f"^{named} do not split over tensor={tensor} devices") as caught:
        check_split(CONFIG, tensor)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("mesh", "batch", "rows"),
    [
        (MeshConfig(expert=8), 17, 24),
        (MeshConfig(data=2, expert=4), 9, 16),
        (MeshConfig(data=2, expert=4), 16, 16),
        # One or none for each device: the rows of a group are few.
        (MeshConfig(data=2, expert=4), 7, 8),
        (MeshConfig(data=2, expert=4), 5, 6),
        (MeshConfig(expert=4, pipeline=2), 9, 9),
        (MeshConfig(data=2, expert=2, sequence=2), 9, 10),
    ],
    ids=str,
)
def test_a_batch_is_filled_up_until_the_devices_that_may_split_it_do(mesh, batch, rows):
    assert filled_rows(batch, mesh.abstract) == rows
    # No device holds more than all of its group.
    axes = split_rows(rows, mesh.abstract)
    assert rows // (mesh.data * mesh.expert if isinstance(axes, tuple) else mesh.data) <= -(-batch // mesh.data)


@pytest.mark.parametrize(
    ("mesh", "batch", "axes"),
    [
        (MeshConfig(data=2, expert=4), 8, ("data", "expert")),
        (MeshConfig(expert=4, tensor=2), 4, ("data", "expert")),
        (MeshConfig(data=2, expert=4), 4, "data"),
        (MeshConfig(data=2, expert=4), 3, None),
        (MeshConfig(data=2), 4, "data"),
        # Where microbatches or rings are cut from rows.
        (MeshConfig(expert=4, pipeline=2), 8, "data"),
        (MeshConfig(expert=4, sequence=2), 8, "data"),
    ],
    ids=str,
)
def test_the_devices_that_have_the_experts_split_rows_where_they_divide(mesh, batch, axes):
    backend = choose_backend("float32", "cpu")
    cache = jax.eval_shape(lambda: create_cache(CONFIG, batch, 32, backend))
    found = batch_shardings((cache, jnp.zeros((batch, 3))), mesh.abstract)
    assert found[1].spec == (PartitionSpec() if axes is None else PartitionSpec(axes))
    for buffer in (found[0].parts[0].keys, found[0].parts[0].values):
        assert buffer.spec[1] == axes
        assert buffer.spec[3] == "tensor"
