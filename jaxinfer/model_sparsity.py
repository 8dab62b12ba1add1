"""Refuses sparsity where a model has none, or where it does not run yet."""

from collections.abc import Callable

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxinfer.checkpoint.few_bits import FewBits
from jaxinfer.checkpoint.leaves import list_leaves
from jaxinfer.checkpoint.matrix_readers import MatrixReader, StoredReader
from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.errors import InvalidOption
from jaxinfer.models.active_columns import ActiveColumns, feed_forward_kernels
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import abstract_params
from jaxinfer.models.families.family import TensorNames
from jaxinfer.models.layers import KERNEL
from jaxinfer.notation import Params
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cpu_kernels.active.products import leaves_out
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.parallel.mesh import PIPELINE, TENSOR
from jaxinfer.parallel.partitioner import Partitioner, partition

_WITH_ZEROS = ("relu", "relu_squared")
# What a TPU's kernel multiplies.
_OF_BLOCKS = ("bfloat16", "float32")


def check_sparsity(
    config: DecoderConfig, backend: Backend, mesh: Mesh | AbstractMesh | None, few_bits: FewBits | None = None
) -> None:
    """Refuse sparsity, if it is asked for, by what is known before weights are read; these are in ``few_bits``."""
    tensor, pipeline = (1 if mesh is None else mesh.shape[axis] for axis in (TENSOR, PIPELINE))
    sparsity = backend.sparsity
    if sparsity is None:
        return
    asked = f"sparsity {sparsity.name!r}"
    if few_bits is not None:
        raise InvalidOption(f"{asked} does not go with weights {few_bits.name!r} yet: leave out one of them")
    if config.experts is not None:
        raise InvalidOption(f"{asked} is for dense feed-forward layers, not for experts: leave it out")
    if sparsity.kind == "topk" and sparsity.amount > config.ffn_dim:
        raise InvalidOption(f"{asked}: a layer has {config.ffn_dim} features: choose fewer, or leave it out")
    if sparsity.kind == "exact" and config.activation not in _WITH_ZEROS:
        raise InvalidOption(
            f"{asked}: {config.family} with {config.activation} has no zeros to leave out: use threshold:T or topk:K, "
            "which change the text, or a model with ReLU (python -m train.relufy makes one)"
        )
    if backend.reads_live_blocks and backend.compute_dtype in _OF_BLOCKS:
        return
    if backend.platform == "cpu" and pipeline > 1:
        raise InvalidOption(f"{asked} does not go with stages of a pipeline on a CPU: use the mesh's other axes")
    own_features = partition(config, backend, mesh).config.ffn_dim // tensor
    if not backend.cpu_kernels or not leaves_out(backend.param_dtype, own_features, config.model_dim):
        raise InvalidOption(f"{asked} has no products for {backend.param_dtype} on this processor: leave it out")


def columns_beside(
    config: DecoderConfig, params: Params, backend: Backend, partitioner: Partitioner
) -> Callable[[Params], Params]:
    """Return what adds the columns to parameters of a model that needs them; refuse as above."""
    if backend.sparsity is None:
        return lambda params: params
    check_sparsity(config, backend, partitioner.mesh)
    _check_params(params, f"sparsity {backend.sparsity.name!r}")
    # A TPU's kernel reads columns as they lie, in whole tiles.
    return (lambda params: params) if backend.reads_live_blocks else ActiveColumns(params).beside


def check_stored(
    checkpoint: Checkpoint,
    names: TensorNames,
    config: DecoderConfig,
    backend: Backend,
    partitioner: Partitioner,
    reader: MatrixReader | None,
) -> None:
    """Refuse sparsity, if it is asked for, with feed-forward kernels that a checkpoint has in few bits; read none."""
    if backend.sparsity is None or not isinstance(reader, StoredReader):
        return
    abstract = abstract_params(*partitioner.partition(config, backend))
    for leaf in list_leaves(abstract, names.spelled_in(checkpoint.tensors.shapes()), None):
        is_multiplied = leaf.path[-3:-1] in (("mlp", "up"), ("mlp", "down"))
        if is_multiplied and reader.keeps(checkpoint, leaf):
            raise InvalidOption(_in_few_bits(f"sparsity {backend.sparsity.name!r}", ".".join(leaf.path[:-1])))


def _in_few_bits(asked: str, kernel: str) -> str:
    return f"{asked} does not go with weights in few bits yet, which {kernel} has: leave it out"


def _check_params(params: Params, asked: str) -> None:
    """Refuse sparsity with kernels in few bits, or with weights that zeros do not make zero."""
    for name, mlp in feed_forward_kernels(params).items():
        for part in {"up", "down"} & mlp.keys():
            kernel = mlp[part][KERNEL]
            if isinstance(kernel, QuantizedArray):
                raise InvalidOption(_in_few_bits(asked, f"{name}.mlp.{part}"))
            if not bool(jnp.all(jnp.isfinite(kernel))):
                raise InvalidOption(f"{asked}: {name}.{part} has weights that are not finite, which zeros leave NaN")
