"""EAGLE drafters that predict well, fitted to a tiny model by least squares, and drafters drawn at random."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import LanguageModel
from jaxinfer.models.config import DecoderConfig, LayerKind, Rope
from jaxinfer.models.drafters.eagle import EagleShape, default_features, init_eagle
from jaxinfer.notation import Params
from tests.decoding.fitted_heads import hidden_states


def eagle_shape(config: DecoderConfig, fuses: bool = True, **changes: Any) -> EagleShape:
    """Return the shape of a small drafter for a model."""
    heads = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "ffn_dim": 48, **changes}
    layer = DecoderConfig(
        family="llama",
        vocab_size=config.vocab_size,
        num_layers=1,
        model_dim=config.model_dim,
        max_position=config.max_position,
        norm_eps=1e-5,
        layer_pattern=(LayerKind(Rope(10000.0, heads["head_dim"])),),
        **heads,
    )
    return EagleShape(
        layer, default_features(config.num_layers) if fuses else (config.num_layers,), config.model_dim, fuses
    )


def random_eagle(lm: LanguageModel, fuses: bool = True, ids: Sequence[int] | None = None, seed: int = 3) -> Any:
    """Return a shape and parameters in which nothing is zero or one, with a draft vocabulary of ``ids``."""
    shape = eagle_shape(lm.config, fuses)
    rows = (lm.config.vocab_size if ids is None else len(ids)) if fuses else None
    params, rng = init_eagle(shape, rows, jax.random.key(seed)), np.random.default_rng(seed)

    def moved(leaf: jax.Array) -> jax.Array:
        return (leaf + 0.2 * rng.standard_normal(leaf.shape)).astype(lm.backend.param_dtype)

    params = jax.tree.map(moved, params)
    return shape, params if ids is None else {**params, "ids": jnp.asarray(ids, jnp.int32)}


def fit_eagle(lm: LanguageModel, texts: Sequence[Sequence[int]]) -> tuple[EagleShape, Params]:
    """Fit an EAGLE-1 drafter whose ``fc`` predicts the next feature, as good as a linear map of what it reads can.

    Its attention and feed-forward part add little, but something.
    """
    shape = eagle_shape(lm.config, fuses=False)
    params = init_eagle(shape, None, jax.random.key(5))
    table_VD = np.asarray(lm.params["embed"]["embedding"], np.float32)
    pairs = [(hidden_states(lm, text).astype(np.float32), list(text)) for text in texts if len(text) > 2]
    read = np.concatenate([np.concatenate([table_VD[text[1:]], hidden[:-1]], axis=1) for hidden, text in pairs])
    said = np.concatenate([hidden[1:] for hidden, _ in pairs])
    bias = np.ones((len(read), 1), np.float32)
    weights = np.linalg.lstsq(np.concatenate([read, bias], axis=1), said, rcond=1e-4)[0]
    params["fc"] = {"kernel": jnp.asarray(weights[:-1].T), "bias": jnp.asarray(weights[-1])}
    for part, last in (("attention", "output"), ("mlp", "down")):
        params[part][last]["kernel"] *= 0.02
    return shape, jax.tree.map(lambda leaf: leaf.astype(lm.backend.param_dtype), params)
