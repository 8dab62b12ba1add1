"""Where the blocks of a cropped text begin, which depends on its length alone: `jaxinfer.cache.cropped`."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.cropped import CroppedCache
from jaxinfer.cache.interface import LayeredCache
from jaxinfer.cache.layouts import CacheLayout, CropLayout
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import DecoderConfig


def block_begins(config: DecoderConfig, layout: CacheLayout, lengths_B: np.ndarray) -> np.ndarray:
    """Return at which token the block begins that the next token of a text of each length is drawn from.

    A block has room for the model's context. The next one begins with the last ``keep`` tokens, once the text is one
    token longer: the last token of a block draws one more. Other layouts have one block.
    """
    if not isinstance(layout, CropLayout):
        return np.zeros_like(lengths_B)
    context = config.max_position
    stride = context + 1 - layout.kept(context)
    return -(-np.maximum(lengths_B - context, 0) // stride) * stride


def begun_at(cache: LayeredCache, begin_B: Any) -> LayeredCache:
    """Return a cropped cache whose blocks begin elsewhere, to be filled anew; another cache as it is."""
    # Each has its own: programs are given a cache to write to, and a buffer can be given once.
    parts = (
        replace(part, begin_B=jnp.array(begin_B)) if isinstance(part, CroppedCache) else part for part in cache.parts
    )
    return cache._replace(parts=tuple(parts))


def check_strategy(strategy: Strategy, layout: CacheLayout) -> None:
    """Refuse strategies that run the target's layers by themselves, with positions of the whole text."""
    own = type(strategy).forward is not Strategy.forward
    if isinstance(layout, CropLayout) and (own or strategy.features):
        raise InvalidOption(
            f"strategy {strategy.name} reads the model's layers itself, which a cropped text forgets: load the model "
            "with the dense cache, or choose another strategy, such as prompt_lookup"
        )
