"""Reads the layer that predicts further tokens out of the checkpoint that it was published in."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoint.leaves import list_leaves
from jaxinfer.checkpoint.load import each_param
from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.errors import InvalidCheckpoint, InvalidOption
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import abstract_params
from jaxinfer.models.drafters.mtp import GLM_FORM, MIMO_FORM, MtpForm, mtp_config
from jaxinfer.models.families.registry import family_of
from jaxinfer.notation import Params
from jaxinfer.ops.backend import Backend


@dataclass(frozen=True)
class _Layout:
    """Where a layer stands: ``place`` comes before its tensors' names, ``names`` are those beside the block's."""

    form: MtpForm
    place: str
    names: Mapping[str, str]


# In the place of the layer after the last one; or apart. Copies of the embedding and of the output matrix that stand
# beside the first are the model's own, and are not read.
_GLM = _Layout(
    GLM_FORM,
    "model.layers.",
    MappingProxyType(
        {"token_norm": "enorm", "hidden_norm": "hnorm", "project": "eh_proj", "final_norm": "shared_head.norm"}
    ),
)
_MIMO = _Layout(
    MIMO_FORM,
    "model.mtp_layers.",
    MappingProxyType(
        {
            "token_norm": "token_layernorm",
            "hidden_norm": "hidden_layernorm",
            "project": "input_proj",
            "final_norm": "final_layernorm",
        }
    ),
)


def read_mtp(checkpoint: Checkpoint, config: DecoderConfig, backend: Backend) -> tuple[MtpForm, Params]:
    """Read the first layer that predicts further tokens for a model of this config.

    Raises InvalidOption for a checkpoint without one, and :class:`InvalidCheckpoint` for one that is not whole.
    """
    found = checkpoint.tensors.shapes().items()
    shapes = {name: shape for name, shape in found if name not in checkpoint.left_out}
    after = config.num_layers
    if f"{_MIMO.place}0.{_MIMO.names['project']}.weight" in shapes:
        layout, layer = _MIMO, 0
    elif f"{_GLM.place}{after}.{_GLM.names['project']}.weight" in shapes:
        layout, layer = _GLM, after
    else:
        raise InvalidOption(
            f"mtp: {checkpoint.origin} has no layer that predicts further tokens after its {after} layers: choose "
            "another strategy, or name the folder that has it, as in mtp:heads=FOLDER"
        )
    names = family_of(checkpoint.config).tensor_names(config).spelled_in(shapes).moved("model.layers.", layout.place)
    own = replace(backend, scan_layers=False)
    block = abstract_params(mtp_config(config), own)["blocks"]["layer_0"]
    abstract = {"blocks": {f"layer_{layer}": block}}
    width, dtype = config.model_dim, np.dtype(backend.param_dtype)
    beside = {name: f"{layout.place}{layer}.{tensor}.weight" for name, tensor in layout.names.items()}
    wanted: dict[str, tuple[int, ...]] = {
        tensor: (width, 2 * width) if name == "project" else (width,) for name, tensor in beside.items()
    }
    for leaf in list_leaves(abstract, names, None):
        wanted |= {part.tensor: leaf.tensor_shape(part) for parts in leaf.sources for part in parts}
    for tensor, shape in wanted.items():
        if tensor not in shapes:
            raise InvalidCheckpoint(f"{checkpoint.origin}: missing tensor {tensor}; fetch all files of the model")
        if tuple(shapes[tensor]) != shape:
            where = f"{checkpoint.origin}: tensor {tensor}"
            raise InvalidCheckpoint(f"{where} has shape {list(shapes[tensor])}, not {list(shape)}")
    params: Params = {
        # Copied, because the file may change while the model is in use.
        name: {("kernel" if name == "project" else "scale"): jnp.array(checkpoint.tensors.read(tensor, dtype))}
        for name, tensor in beside.items()
    }
    read: dict[str, Any] = {}
    for (_, _, *folders, last), value in each_param(checkpoint, names, abstract):
        reduce(lambda node, key: node.setdefault(key, {}), folders, read)[last] = value
    return layout.form, {"block": read, **params}
