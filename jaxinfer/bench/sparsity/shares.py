"""Which features of each layer a model has use for, token by token of a text."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.bench.identity.bisect import check_bisects
from jaxinfer.language_model import LanguageModel
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.tapped_forward import tapped_forward

_ACTIVATED = ".mlp.activated"


def active_features(lm: LanguageModel, tokens: Sequence[int]) -> list[np.ndarray]:
    """Return for each layer, ``[T, F]``, which features are not zero at each token of a text."""
    check_bisects(lm)
    length = len(tokens)
    cache = lm.programs.create_cache(1, length, 1)
    found = lm.programs.run(
        ("active", length),
        partial(_active, lm.programs.decoder),
        (),
        lm.params,
        cache,
        jnp.asarray([list(tokens)], jnp.int32),
        jnp.full((1,), length, jnp.int32),
    )
    return [np.asarray(active_BTF)[0] for active_BTF in found]


def _active(decoder: Decoder, params: Any, cache: Any, tokens_BT: Any, lengths_B: Any) -> list[Any]:
    length = tokens_BT.shape[1]
    placements = cache.place(jnp.zeros_like(lengths_B), jnp.tril(jnp.ones((1, length, length), bool)))
    positions_BT = jnp.arange(length, dtype=jnp.int32)[None]
    taps, _ = tapped_forward(decoder, params, tokens_BT, positions_BT, cache, placements, lengths_B)
    return [array != 0 for name, array in taps if name.endswith(_ACTIVATED)]
