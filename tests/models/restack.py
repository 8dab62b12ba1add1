"""The same parameters for separate blocks and for scanned ones."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import abstract_params
from jaxinfer.models.layers import KERNEL, locate, stored_kernel
from jaxinfer.notation import Params
from jaxinfer.ops.backend import Backend
from tests.toys import float32_backend


def scanned(config: DecoderConfig, params: Params) -> Params:
    """Stack the parameters of separate blocks in the way a decoder with scanned layers has them."""
    return arranged(config, params, float32_backend(scan_layers=True))


def arranged(config: DecoderConfig, params: Params, backend: Backend) -> Params:
    """Stack or turn the parameters of separate blocks in the way a backend has them; dtypes stay."""

    def gather(path: Any, struct: jax.ShapeDtypeStruct) -> Any:
        location = locate(tuple(key.key for key in path), struct.shape)
        if location.layers is None:
            return at(params, location.name)
        leaves = [at(params["blocks"][f"layer_{layer}"], location.name) for layer in location.layers]
        if location.transposed:
            leaves = [leaf.T for leaf in leaves]
        return jnp.stack(leaves) if location.stacked else leaves[0]

    return jax.tree_util.tree_map_with_path(gather, abstract_params(config, backend))


def at(params: Params, name: str) -> Any:
    """Return the parameter of a name joined by dots; a linear layer's kernel as ``[out, in]``."""
    *keys, last = name.split(".")
    node: Any = params
    for key in keys:
        node = node[key]
    return stored_kernel(node) if last == KERNEL else node[last]
