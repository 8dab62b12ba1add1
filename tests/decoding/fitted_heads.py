"""Heads that predict well, fitted to a tiny model by least squares; and what drafting with heads must come to."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import LanguageModel
from jaxinfer.decoding.batch import prompt_bucket
from jaxinfer.decoding.step import forward_prompt
from jaxinfer.decoding.trees.dynamic import Growth
from jaxinfer.decoding.trees.static import CAUTION, Paths, tree_depth
from jaxinfer.models.decoder import Decoder, create_cache
from jaxinfer.models.model import Model
from jaxinfer.notation import Params
from jaxinfer.ops.few_bits.panels import PanelArray
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from tests.ops.rounded_in_groups import rounded_in_groups

TokenPath = tuple[int, ...]


class Acceptance(NamedTuple):
    """What a text's drafts come to: steps, drafts taken by depth, and how many of them no first sibling."""

    steps: int
    accepted_by_depth: tuple[int, ...]
    later_siblings: int


def hidden_states(lm: LanguageModel, tokens: Sequence[int]) -> np.ndarray:
    """Return the final hidden states of a text, ``[T, D]``."""
    width = prompt_bucket(len(tokens))
    tokens_1T = jnp.asarray([[*tokens, *[0] * (width - len(tokens))]], jnp.int32)
    return np.asarray(_hidden(lm.programs.decoder, lm.params, tokens_1T))[0, : len(tokens)]


@partial(jax.jit, static_argnums=0)
def _hidden(decoder: Decoder, params: Params, tokens_1T: Any) -> Any:
    width = tokens_1T.shape[1]
    cache, lengths_B = create_cache(decoder.config, 1, width, decoder.backend), jnp.asarray([width], jnp.int32)
    return forward_prompt(Model(decoder, params), tokens_1T, lengths_B, cache, width)[0]


def fit_plain(lm: LanguageModel, tokens: Sequence[int], num_heads: int) -> Params:
    """Fit each head's own output matrix on random blocks over the hidden states of a text."""
    rng, hidden_TD = np.random.default_rng(1), hidden_states(lm, tokens)
    width, vocab_size = hidden_TD.shape[1], lm.config.vocab_size
    heads = []
    for index in range(num_heads):
        block = _block(rng, width, width)
        features_TD, targets_TV = _pairs(hidden_TD, np.eye(vocab_size, dtype=np.float32)[tokens], index)
        states_TD = features_TD + _silu(features_TD @ block["kernel"].T + block["bias"])
        heads.append({"blocks": (block,), "output": {"kernel": np.linalg.lstsq(states_TD, targets_TV)[0].T}})
    return _as_jax({"heads": tuple(heads)})


def fit_conditioned(lm: LanguageModel, tokens: Sequence[int], num_heads: int, inner: int = 256) -> Params:
    """Fit heads with an MLP over the hidden state and the path's embeddings, and the text's tokens as vocabulary."""
    rng, hidden_TD = np.random.default_rng(2), hidden_states(lm, tokens)
    width, ids = hidden_TD.shape[1], np.unique(tokens)
    assert len(ids) <= width, "each token of the text needs a channel of its own"
    table_VD = np.asarray(lm.params["embed"]["embedding"])
    codes_TD = np.eye(width, dtype=np.float32)[np.searchsorted(ids, tokens)]
    heads = []
    for index in range(num_heads):
        block = _block(rng, inner, width * (index + 2))
        features_TD, targets_TD = _pairs(hidden_TD, codes_TD, index)
        count = len(features_TD)
        path = [table_VD[np.asarray(tokens)[1 + step : 1 + step + count]] for step in range(index + 1)]
        inner_TF = _silu(np.concatenate([features_TD, *path], axis=1) @ block["kernel"].T + block["bias"])
        out_DF = np.linalg.lstsq(inner_TF, targets_TD - features_TD)[0].T
        output = {"kernel": np.eye(width, dtype=np.float32)[: len(ids)]}
        heads.append({"blocks": ({**block, "out": out_DF},), "output": output})
    return _as_jax({"heads": tuple(heads), "ids": ids})


def sharpened(head_params: Params) -> Params:
    """Make heads fitted by least squares, which score tokens from 0 to 1, as sure of themselves as trained ones."""
    heads = tuple({**head, "output": {"kernel": 10 * head["output"]["kernel"]}} for head in head_params["heads"])
    return {**head_params, "heads": heads}


def expected_acceptance(
    lm: LanguageModel, head_params: Params, paths: Paths, text: Sequence[int], prompt_length: int
) -> Acceptance:
    """Draft along a finished text by the definition of heads, in NumPy."""
    hidden_TD, table_VD = hidden_states(lm, text), np.asarray(lm.params["embed"]["embedding"])
    ids = np.asarray(head_params.get("ids", np.arange(lm.config.vocab_size)))
    accepted, steps, later, current = np.zeros(tree_depth(paths), int), 0, 0, prompt_length
    while current < len(text) - 1:
        path: tuple[int, ...] = ()
        while current + len(path) + 1 < len(text) and len(path) < len(head_params["heads"]):
            along = table_VD[list(text[current : current + len(path) + 1])]
            scores_W = head_scores(head_params["heads"][len(path)], hidden_TD[current - 1], along)
            wanted = np.flatnonzero(ids == text[current + len(path) + 1])
            ranking = np.argsort(-scores_W, kind="stable")
            rank = int(np.flatnonzero(ranking == wanted[0])[0]) if len(wanted) else len(ids)
            if (*path, rank) not in paths:
                break
            path = (*path, rank)
        accepted[: len(path)] += 1
        later += sum(rank > 0 for rank in path)
        steps += 1
        current += len(path) + 1
    return Acceptance(steps, tuple(accepted.tolist()), later)


def best_paths(growth: Growth, log_p_after: Callable[[TokenPath], Sequence[float]]) -> dict[TokenPath, float]:
    """Return the paths of a grown tree, tokens from the root on, with their log-probabilities, by the definition."""
    beams: list[tuple[float, TokenPath]] = [(0.0, ())]
    grown: list[tuple[float, TokenPath]] = []
    for _ in range(growth.max_depth):
        level = []
        for score, path in beams:
            log_p_V = np.asarray(log_p_after(path), np.float64)
            best = np.argsort(-log_p_V, kind="stable")[: growth.num_ranks]
            level += [(score + float(log_p_V[token]), (*path, int(token))) for token in best]
        beams = sorted(level, key=lambda node: -node[0])[: growth.num_beams]
        grown += level
    chosen = sorted(grown, key=lambda node: -node[0])[: growth.num_nodes - 1]
    return {path: score for score, path in chosen}


def expected_steps(
    lm: LanguageModel, head_params: Params, growth: Growth, text: Sequence[int], prompt_length: int
) -> tuple[int, tuple[int, ...]]:
    """Grow trees along a finished text by the definition, in NumPy; return the steps and the drafts taken by depth."""
    hidden_TD, table_VD = hidden_states(lm, text), np.asarray(lm.params["embed"]["embedding"])
    ids = np.asarray(head_params.get("ids", np.arange(lm.config.vocab_size)))
    accepted, steps, current = np.zeros(growth.max_depth, int), 0, prompt_length
    while current < len(text) - 1:

        def log_p_after(path: TokenPath, current: int = current) -> np.ndarray:
            along_PD = table_VD[[text[current], *path]]
            scores_W = head_scores(head_params["heads"][len(path)], hidden_TD[current - 1], along_PD) / CAUTION
            log_p_V = np.full(lm.config.vocab_size, -1e9)
            log_p_V[ids] = scores_W - np.log(np.exp(scores_W - scores_W.max()).sum()) - scores_W.max()
            return log_p_V

        tree, taken = best_paths(growth, log_p_after), 0
        while tuple(text[current + 1 : current + 2 + taken]) in tree and current + taken + 1 < len(text):
            taken += 1
        accepted[:taken] += 1
        steps += 1
        current += taken + 1
    return steps, tuple(accepted.tolist())


def head_scores(head: Params, hidden_D: np.ndarray, along_PD: np.ndarray) -> np.ndarray:
    """Return a head's scores of its vocabulary, after a hidden state and the embeddings of the tokens drafted on."""
    (block,) = head["blocks"]
    is_conditioned = block["kernel"].shape[1] > len(hidden_D)
    inputs = np.concatenate([hidden_D, along_PD.reshape(-1)]) if is_conditioned else hidden_D
    inner = _silu(multiplied(block["kernel"], inputs) + np.asarray(block["bias"]))
    state_D = hidden_D + (multiplied(block["out"], inner) if "out" in block else inner)
    return multiplied(head["output"]["kernel"], state_D)


def multiplied(matrix: Any, vector: np.ndarray) -> np.ndarray:
    """Return a product with a matrix of a drafter, which a CPU holds in few bits, and rounds what it multiplies by."""
    if isinstance(matrix, PanelArray):
        return np.asarray(matrix.dequantize()) @ rounded_in_groups(vector)
    if isinstance(matrix, QuantizedArray):
        return np.asarray(matrix.dequantize()) @ np.asarray(jnp.asarray(vector, jnp.bfloat16), np.float32)
    return np.asarray(matrix) @ vector


def _pairs(hidden_TD: np.ndarray, targets: np.ndarray, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Pair the state at t with the target at t + 2 + index: one on is the current token, then the head's depth."""
    return hidden_TD[: len(hidden_TD) - 2 - index], targets[2 + index :]


def _block(rng: np.random.Generator, features: int, inputs: int) -> Params:
    kernel = rng.standard_normal((features, inputs)).astype(np.float32) * inputs**-0.5
    return {"kernel": kernel, "bias": rng.standard_normal(features).astype(np.float32)}


def _silu(values: np.ndarray) -> np.ndarray:
    return values / (1 + np.exp(-values))


def _as_jax(head_params: Params) -> Params:
    heads = tuple(
        {
            "blocks": tuple({name: jnp.asarray(array) for name, array in block.items()} for block in head["blocks"]),
            "output": {"kernel": jnp.asarray(head["output"]["kernel"])},
        }
        for head in head_params["heads"]
    )
    return {"heads": heads, **({"ids": jnp.asarray(head_params["ids"], jnp.int32)} if "ids" in head_params else {})}
