"""An MTP layer that predicts well, fitted to a tiny model by least squares."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import LanguageModel
from jaxinfer.models.drafters.mtp import mtp_config
from jaxinfer.notation import Params
from tests.decoding.fitted_heads import hidden_states
from tests.toys import random_params


def fit_mtp(lm: LanguageModel, tokens: Sequence[int]) -> Params:
    """Fit the projection of MiMo's form, so that with a block that adds nothing it foretells the next hidden state."""
    config = lm.config
    block = jax.tree_util.tree_map_with_path(
        # What adds to the hidden state, experts' too.
        lambda path, leaf: jnp.zeros_like(leaf) if {"output", "down"} & {part.key for part in path} else leaf,
        random_params(mtp_config(config), seed=5)["blocks"]["layer_0"],
    )
    hidden_TD = np.asarray(hidden_states(lm, tokens), np.float64)
    ids_1T, places_1T = jnp.asarray([tokens]), jnp.arange(len(tokens))[None]
    embedded_1TD = lm.programs.decoder.apply({"params": lm.params}, ids_1T, places_1T, method="embedded")
    embedded_TD = np.asarray(embedded_1TD[0], np.float64)
    final = {name: np.asarray(value, np.float64) for name, value in lm.params["final_norm"].items()}
    scale_D = final["scale"] + 1 - config.neutral_scale
    # What the last norm makes the hidden state of.
    wanted_TD = (hidden_TD - final.get("bias", 0)) / scale_D
    inputs = [_normed(config.norm, hidden_TD[:-1]), _normed(config.norm, embedded_TD[1:])]
    kernel_DJ = np.linalg.lstsq(np.concatenate(inputs, axis=1)[1:], wanted_TD[2:])[0].T
    neutral = {"scale": np.full(len(scale_D), config.neutral_scale)}
    neutral |= {"bias": np.zeros(len(scale_D))} if "bias" in final else {}
    norms = {"token_norm": neutral, "hidden_norm": neutral, "final_norm": lm.params["final_norm"]}
    params = {"block": block, "project": {"kernel": kernel_DJ}, **norms}
    return jax.tree.map(lambda leaf: jnp.array(leaf, lm.backend.param_dtype), params)


def _normed(kind: str, values_TD: np.ndarray) -> np.ndarray:
    centred_TD = values_TD - values_TD.mean(axis=-1, keepdims=True) if kind == "layer" else values_TD
    return centred_TD / np.sqrt((centred_TD**2).mean(axis=-1, keepdims=True) + 1e-6)
