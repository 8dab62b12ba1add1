"""A DFlash drafter that predicts well, trained on a tiny model; and what drafting with it must come to."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import LanguageModel
from jaxinfer.decoding.batch import Request
from jaxinfer.decoding.trees.static import Paths, tree_depth
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.drafters.dflash import DFlashConfig, init_dflash
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Float, Int, Params
from tests.decoding.fitted_heads import Acceptance
from tests.models.drafters.published_dflash import published_block
from train.dflash.loss import DFlashLoss
from train.features.hidden_states import HiddenStates
from train.features.text_pass import Texts, run_before
from train.heads.loss import target_rows
from train.loop.step import Schedule, TrainState, compile_step
from train.streams.rows import RowSource
from train.texts.packing import Example, Order, split_batch

_NUM_ROWS, _NUM_ANCHORS, _GRID = 5, 16, 64


def features_of(lm: LanguageModel, texts: Sequence[Sequence[int]], layers: tuple[int, ...]) -> list[np.ndarray]:
    """Return the hidden states of whole texts before some layers, ascending, side by side."""
    tokens_BT = np.zeros((len(texts), -(-max(map(len, texts)) // _GRID) * _GRID), np.int32)
    for row, text in enumerate(texts):
        tokens_BT[row, : len(text)] = text
    found_BTF = np.asarray(_features(lm.programs.decoder, layers, lm.params, tokens_BT))
    return [found_BTF[row, : len(text)] for row, text in enumerate(texts)]


@partial(jax.jit, static_argnums=(0, 1))
def _features(
    decoder: Decoder, layers: tuple[int, ...], params: Params, tokens_BT: Int[Array, "B T"]
) -> Float[Array, "B T F"]:
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape)
    placed = Texts(tokens_BT, positions_BT, jnp.ones_like(tokens_BT))
    return run_before(Model(decoder, params), placed, layers).astype(jnp.float32)


def fit_dflash(
    lm: LanguageModel, dflash: DFlashConfig, texts: Sequence[Sequence[int]], num_steps: int = 120, rate: float = 1e-2
) -> Params:
    """Train a drafter on the texts themselves, in float32; the model stays as it is."""
    hidden_PF = np.concatenate(features_of(lm, texts, tuple(sorted(dflash.features))))
    examples = [Example(tuple(text), (True,) * len(text)) for text in texts]
    counts = [len(text) for text in texts]
    texts_P = np.repeat(np.arange(len(texts)), counts)
    states = HiddenStates(hidden_PF, texts_P, texts_P, texts_P, np.ones(len(texts_P), bool))
    rows_V = target_rows(lm.config.vocab_size, None)
    source = RowSource(examples, states, np.arange(len(texts)), max(counts), _NUM_ANCHORS, 0, rows_V)
    own = replace(lm.backend, param_dtype="float32", compute_dtype="float32")
    loss, optimizer = DFlashLoss(lm.programs.decoder, dflash, own, 4.0), Schedule(num_steps, rate).build_optimizer()
    params = init_dflash(dflash, own, 0)
    state, step = TrainState(jnp.int32(0), params, optimizer.init(params)), compile_step(loss, optimizer)
    losses, order = [], Order(source.count, min(source.count, _NUM_ROWS), 0)
    for at in range(num_steps):
        batch = split_batch(source.sample(order.at(at), at), 1)
        state, metrics = step(state, {"params": lm.params}, batch)
        losses.append(metrics.loss)
    assert losses[-1] < 0.75 * losses[0], "the drafter has learned nothing"
    return state.params


def expected_acceptance(
    lm: LanguageModel, folder: Path, paths: Paths, requests: Sequence[Request], outputs: Sequence[Sequence[int]]
) -> list[Acceptance]:
    """Draft along finished texts by the published module over its files, in NumPy."""
    settings = json.loads((folder / "config.json").read_text())
    ids, texts = (
        settings["dflash_config"]["target_layer_ids"],
        [[*request.prompt, *output] for request, output in zip(requests, outputs)],
    )
    # The output of a layer is what the next one reads.
    read = features_of(lm, texts, tuple(layer + 1 for layer in ids))
    return [
        _along(lm, folder, settings, paths, hidden_TF, text, len(request.prompt))
        for hidden_TF, text, request in zip(read, texts, requests)
    ]


def _along(
    lm: LanguageModel,
    folder: Path,
    settings: Mapping[str, Any],
    paths: Paths,
    hidden_TF: np.ndarray,
    text: Sequence[int],
    prompt_length: int,
) -> Acceptance:
    table_VD, head_VD = (np.asarray(lm.params[one][name]) for one, name in (("embed", "embedding"), ("head", "kernel")))
    masks = [settings["dflash_config"]["mask_token_id"]] * (settings["block_size"] - 1)
    depth = tree_depth(paths)
    accepted, steps, later, current = np.zeros(depth, int), 0, 0, prompt_length
    while current < len(text) - 1:
        states_ND = published_block(folder, hidden_TF[:current], table_VD[[text[current], *masks]])
        logits_NV = states_ND @ head_VD.T
        path: tuple[int, ...] = ()
        while current + len(path) + 1 < len(text) and len(path) < depth:
            ranking = np.argsort(-logits_NV[len(path) + 1], kind="stable")
            rank = int(np.flatnonzero(ranking == text[current + len(path) + 1])[0])
            if (*path, rank) not in paths:
                break
            path = (*path, rank)
        accepted[: len(path)] += 1
        later += sum(rank > 0 for rank in path)
        steps += 1
        current += len(path) + 1
    return Acceptance(steps, tuple(accepted.tolist()), later)
