"""Where the end of a text stood before, and what followed there: for drafters that copy from the text itself."""

import jax.numpy as jnp

from jaxinfer.decoding.strategy import Target
from jaxinfer.notation import Array, Float, Int

# How often the token that followed a match of 1, 2, ... tokens, and of the last number or more, was the next one again:
# along 52 plain texts, the default model's greedy answers to Spec-Bench prompts. A draft that was right so far is a
# longer match, and its further tokens were right as often as those of one.
GOES_ON = (0.22, 0.49, 0.65, 0.66, 0.75, 0.9)
# Of texts, too, it differs how often: matches of one, of two, and of more tokens are counted apart.
NUM_KINDS = 3


def shortest_worth(target: Target) -> int:
    """Return how long a match has to be for a step of its own.

    On a CPU the nodes of a step cost more than what single tokens predict is worth.
    """
    return 1 if target.backend.has_free_rows else 2


def match_lengths(tokens_BS: Int[Array, "B S"], lengths_B: Int[Array, " B"], most: int) -> Int[Array, "B S"]:
    """Return how many tokens up to and with each place equal those at the text's end, counted up to ``most``.

    The end itself, and what stands past it, count as no match.
    """
    place_1S = jnp.arange(tokens_BS.shape[1])[None, :]
    is_before_BS = place_1S < lengths_B[:, None] - 1
    count_BS = jnp.zeros(tokens_BS.shape, jnp.int32)
    alive_BS = is_before_BS
    for back in range(most):
        last_B1 = jnp.take_along_axis(tokens_BS, jnp.maximum(lengths_B[:, None] - 1 - back, 0), axis=1)
        shifted_BS = jnp.pad(tokens_BS, ((0, 0), (back, 0)))[:, : tokens_BS.shape[1]]
        alive_BS = alive_BS & (shifted_BS == last_B1) & (place_1S >= back) & (lengths_B[:, None] > back)
        count_BS = count_BS + alive_BS
    return count_BS


def continuations(
    tokens_BS: Int[Array, "B S"], lengths_B: Int[Array, " B"], places_BC: Int[Array, "B C"], count: int
) -> Int[Array, "B C J"]:
    """Return the ``count`` tokens after each place; where the text ends among them, they go on periodically."""
    period_BC1 = jnp.maximum(lengths_B[:, None] - 1 - places_BC, 1)[..., None]
    source_BCJ = places_BC[..., None] + 1 + jnp.arange(count) % period_BC1
    batch, num_places = places_BC.shape
    follow_BCJ = jnp.take_along_axis(tokens_BS, source_BCJ.reshape(batch, -1), axis=1, mode="clip")
    return follow_BCJ.reshape(batch, num_places, count)


def chances_after(length_B: Int[Array, " B"], count: int) -> Float[Array, "B J"]:
    """Return how likely each of the tokens that followed a match of such a length follows again, with all before it."""
    longer_BJ = jnp.clip(length_B[:, None] + jnp.arange(count), 1, len(GOES_ON))
    return jnp.cumprod(jnp.asarray(GOES_ON, jnp.float32)[longer_BJ - 1], axis=1)


def kinds_of(length_B: Int[Array, " B"]) -> Int[Array, " B"]:
    """Return the kind of drafts that follow matches of such lengths, one of `NUM_KINDS`."""
    return jnp.clip(length_B, 1, NUM_KINDS) - 1
