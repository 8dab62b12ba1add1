"""Where a growing text outgrows its cache: ``longrope`` turns every token by other factors past its original length.

Tokens that were cached before then hold the short factors, so the cache is computed anew for the long ones. Hugging
Face does so for Phi-3. The text is then, at any length, what a forward pass over all of it draws next. A cropped text
(`jaxinfer.decoding.cropping`) outgrows each of its blocks.
"""

import numpy as np

from jaxinfer.cache.layouts import DENSE, CacheLayout, CropLayout
from jaxinfer.decoding.cropping import block_begins
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.streaming import is_endless


def switch_lengths(config: DecoderConfig, layout: CacheLayout = DENSE) -> list[int]:
    """Return the lengths of text past which all its tokens are rotated otherwise, in ascending order."""
    if is_endless(layout):  # its positions never reach that far
        return []
    scalings = {kind.rope.scaling for kind in config.kinds if kind.rope is not None}
    return sorted(
        {scaling.original_max_position for scaling in scalings if scaling is not None and scaling.kind == "longrope"}
    )


def crossed_lengths(
    config: DecoderConfig, lengths_B: np.ndarray, limits_B: np.ndarray, layout: CacheLayout = DENSE
) -> list[int]:
    """Return the switch lengths that lie between texts and their limits.

    The last token of a text is drawn from those before it, so a limit of one more than a switch does not cross it.
    """
    switches = switch_lengths(config, layout)
    return [switch for switch in switches if ((lengths_B <= switch) & (limits_B > switch + 1)).any()]


def reachable_lengths(
    config: DecoderConfig, context_lengths_B: np.ndarray, limits_B: np.ndarray, layout: CacheLayout = DENSE
) -> np.ndarray:
    """Return up to which length each text may grow on a cache that was begun for a text of ``context_lengths_B``."""
    reach_B = limits_B.copy()
    if isinstance(layout, CropLayout):
        full_B = block_begins(config, layout, context_lengths_B) + config.max_position
        return np.minimum(reach_B, full_B + 1)
    for switch in switch_lengths(config, layout):
        reach_B = np.where(context_lengths_B <= switch, np.minimum(reach_B, switch + 1), reach_B)
    return reach_B
