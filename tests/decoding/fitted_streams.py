"""Streams that predict well, trained on a tiny model; and what drafting with streams must come to."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxinfer import LanguageModel
from jaxinfer.decoding.trees.static import Paths, tree_depth
from jaxinfer.models.decoder import create_cache
from jaxinfer.models.drafters.streams import StreamsConfig, exit_logits, init_streams, run_streams
from jaxinfer.models.model import Model
from jaxinfer.notation import Params
from jaxinfer.ops.masks import causal_ancestors
from tests.decoding.fitted_heads import Acceptance
from tests.models.drafters.dense_streams import dense_streams


def fit_streams(
    lm: LanguageModel, streams: StreamsConfig, tokens: Sequence[int], num_steps: int = 150, length: int = 32
) -> Params:
    """Train streams on what follows in the text, and the early exit on what comes next; the model stays as it is."""
    model = Model(lm.programs.decoder, lm.params)
    config, ahead = model.config, streams.num_streams + 1
    positions_BT = jnp.arange(length, dtype=jnp.int32)[None]
    zero_B, length_B = jnp.zeros((1,), jnp.int32), jnp.full((1,), length, jnp.int32)
    first = config.num_layers - streams.num_layers

    def loss(stream_params: Params, window_W: jax.Array) -> jax.Array:
        cache = create_cache(config, 1, length * ahead, model.decoder.backend)
        relation = causal_ancestors(length)[None]
        hidden_BTD = model.embedded(window_W[None, :length], positions_BT)
        placements = cache.place(zero_B, relation)
        hidden_BTD, cache = model.run_layers(0, first, hidden_BTD, positions_BT, cache, placements, length_B)
        run = run_streams(
            model, stream_params, streams.num_layers, hidden_BTD, zero_B, relation, positions_BT, cache, length_B
        )
        logits = jnp.concatenate(
            [exit_logits(model, stream_params, hidden_BTD)[:, :, None], model.logits(run.streams_BMJD)], axis=2
        )
        targets = jnp.stack([window_W[1 + step : 1 + step + length] for step in range(ahead)], axis=1)[None]
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    optimizer = optax.adam(optax.cosine_decay_schedule(2e-2, num_steps))

    def advance(carry, windows_RW):
        stream_params, moments = carry
        value, gradient = jax.value_and_grad(
            lambda stream_params: jax.vmap(loss, (None, 0))(stream_params, windows_RW).mean()
        )(stream_params)
        updates, moments = optimizer.update(gradient, moments)
        if "blocks" in updates:  # at the others' rate they would undo what the base knows
            updates = {**updates, "blocks": jax.tree.map(lambda leaf: leaf / 8, updates["blocks"])}
        return (optax.apply_updates(stream_params, updates), moments), value

    starts = np.random.default_rng(0).integers(0, len(tokens) - length - ahead, (num_steps, 6))
    windows_SRW = jnp.asarray(np.asarray(tokens, np.int32)[starts[..., None] + np.arange(length + ahead)])
    stream_params = init_streams(streams, config, model.decoder.backend, jax.random.key(0))
    (stream_params, _), losses = jax.jit(lambda carry, windows: jax.lax.scan(advance, carry, windows))(
        (stream_params, optimizer.init(stream_params)), windows_SRW
    )
    assert losses[-1] < 0.75 * losses[0], "the streams have learned nothing"
    return stream_params


def expected_acceptance(
    lm: LanguageModel, stream_params: Params, num_layers: int, paths: Paths, text: Sequence[int], prompt_length: int
) -> Acceptance:
    """Draft along a finished text by the definition of streams, in NumPy."""
    streams_TJV = dense_streams(lm.config, lm.params, stream_params, num_layers, text).streams_TJV
    depth = tree_depth(paths)
    accepted, steps, later, current = np.zeros(depth, int), 0, 0, prompt_length
    while current < len(text) - 1:
        path: tuple[int, ...] = ()
        while current + len(path) + 1 < len(text) and len(path) < depth:
            ranking = np.argsort(-streams_TJV[current - 1, len(path)], kind="stable")
            rank = int(np.flatnonzero(ranking == text[current + len(path) + 1])[0])
            if (*path, rank) not in paths:
                break
            path = (*path, rank)
        accepted[: len(path)] += 1
        later += sum(rank > 0 for rank in path)
        steps += 1
        current += len(path) + 1
    return Acceptance(steps, tuple(accepted.tolist()), later)
