"""The joint law of the first tokens of many texts, against the one that they should have."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from jaxinfer import SamplingParams
from jaxinfer.decoding.acceptance import rejection
from jaxinfer.decoding.acceptance.walk import emitted_tokens
from jaxinfer.decoding.trees.tree import DraftTree, ancestors, depths
from jaxinfer.sampling import sampling_arrays

# Every cell of a chi-square expects this many texts.
LEAST_EXPECTED = 5.0

# Three children of the root, two of each: often the same token, as all are drawn from one distribution.
PARENTS = (0, 0, 0, 0, 1, 1, 2, 2, 3, 3)
MAX_DEPTH = 2


def chance(tokens_N3: np.ndarray, law_VVV: np.ndarray) -> float:
    """Return the chance of first three tokens as far from their law as these, by chi-square; rare texts are pooled."""
    vocab_size = len(law_VVV)
    cells_N = (tokens_N3[:, 0] * vocab_size + tokens_N3[:, 1]) * vocab_size + tokens_N3[:, 2]
    counts, expected = np.bincount(cells_N, minlength=vocab_size**3), law_VVV.reshape(-1) * len(cells_N)
    order = np.argsort(expected)
    num_pooled = int(np.searchsorted(np.cumsum(expected[order]), LEAST_EXPECTED)) + 1
    num_pooled = max(num_pooled, int((expected < LEAST_EXPECTED).sum()))
    starts = np.concatenate([[0], np.arange(num_pooled, len(order))])
    observed, wanted = (np.add.reduceat(values[order], starts) for values in (counts, expected))
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    return float(scipy.stats.chi2.sf(statistic, len(starts) - 1))


class Chains(NamedTuple):
    """What a token is drawn from: first ``first_V``, then by the token before it, at depths 2 and 3."""

    first_V: Any
    second_VV: Any
    third_VV: Any

    @property
    def law_VVV(self) -> np.ndarray:
        """The joint law of three tokens."""
        return self.first_V[:, None, None] * self.second_VV[:, :, None] * self.third_VV[None]


def random_chains(seed: int, vocab_size: int, near: Chains | None = None, distance: float = 1.0) -> Chains:
    """Draw distributions, or ones that are near others."""
    rng = np.random.default_rng(seed)

    def draw(base: np.ndarray | None, *shape: int) -> np.ndarray:
        logits = distance * rng.standard_normal(shape) + (0 if base is None else np.log(base))
        weights = np.exp(logits)
        return weights / weights.sum(axis=-1, keepdims=True)

    shapes = ((vocab_size,), (vocab_size, vocab_size), (vocab_size, vocab_size))
    return Chains(*(draw(base, *shape) for base, shape in zip(near or (None, None, None), shapes)))


def kept(chains: Chains, count: int) -> Chains:
    """Return distributions of the ``count`` likeliest tokens alone."""

    def cut(table: np.ndarray) -> np.ndarray:
        least = np.sort(table, axis=-1)[..., -count, None]
        weights = np.where(table >= least, table, 0)
        return weights / weights.sum(axis=-1, keepdims=True)

    return Chains(*map(cut, chains))


class Game(NamedTuple):
    """Three tokens of each text, how many nodes of its tree were taken, and whether the last was no first sibling."""

    tokens_N3: Any
    taken_N: Any
    later_N: Any


def draft_and_reject(target: Chains, drafter: Chains, num_texts: int, *, is_distinct: bool = False) -> Game:
    """Draft as many trees from one distribution, verify them for another, and end short texts with the latter.

    With ``is_distinct`` siblings are drawn without those before; where none is left to draw, the next token comes.
    """
    vocab_size = len(target.first_V)
    (row,) = [sampling_arrays([SamplingParams(temperature=1.0)], [0], (), vocab_size)]
    arrays = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_texts, *leaf.shape[1:])), row)
    seeds_N = jnp.arange(num_texts, dtype=jnp.uint32)
    arrays = arrays._replace(key_data_B2=jnp.stack([jnp.zeros_like(seeds_N), seeds_N], axis=1))
    parents_BM = jnp.broadcast_to(jnp.asarray(PARENTS, jnp.int32), (num_texts, len(PARENTS)))
    depths_M = np.asarray(depths(ancestors(parents_BM[:1])))[0]

    def play(log_p: Chains, log_q: Chains, key: jax.Array):
        key, *keys = jax.random.split(key, len(PARENTS) + 1)

        def after(log: Chains, node: int, token_B):
            return (jnp.broadcast_to(log[0], (num_texts, vocab_size)), log[1][token_B], log[2][token_B])[depths_M[node]]

        tokens = [jnp.zeros((num_texts,), jnp.int32)]
        for node in range(1, len(PARENTS)):
            parent = PARENTS[node]
            scores_BV = after(log_q, parent, tokens[parent]) + jax.random.gumbel(keys[node], (num_texts, vocab_size))
            if is_distinct:
                scores_BV = jnp.maximum(scores_BV, -1e30)
                for sibling in range(1, node):
                    if PARENTS[sibling] == parent:
                        scores_BV = scores_BV.at[jnp.arange(num_texts), tokens[sibling]].set(-jnp.inf)
            tokens.append(jnp.argmax(scores_BV, axis=-1).astype(jnp.int32))
        tokens_BM, all_BM = jnp.stack(tokens, axis=1), jnp.ones(parents_BM.shape, bool)
        tree, relation_BMM = DraftTree(tokens_BM, parents_BM, all_BM, all_BM), ancestors(parents_BM)
        log_p_BMV, log_q_BMV = (
            jnp.stack([after(log, node, tokens[node]) for node in range(len(PARENTS))], axis=1)
            for log in (log_p, log_q)
        )
        positions_BM = 7 + jnp.broadcast_to(jnp.asarray(depths_M), parents_BM.shape)
        distributions, how = (log_p_BMV, log_q_BMV), {"has_distinct_siblings": is_distinct}
        walk = rejection.reject(tree, relation_BMM, positions_BM, *distributions, arrays, MAX_DEPTH, **how)
        emitted_B3 = emitted_tokens(tree, walk)[:, : MAX_DEPTH + 1]
        for place in (1, 2):
            rest_B = jax.random.categorical(jax.random.fold_in(key, place), log_p[place][emitted_B3[:, place - 1]])
            emitted_B3 = emitted_B3.at[:, place].set(jnp.where(walk.taken_B > place, emitted_B3[:, place], rest_B))
        last_B = walk.path_BM[:, -1]
        index_M = jnp.arange(len(PARENTS))
        earlier_BM = (parents_BM == jnp.asarray(PARENTS)[last_B][:, None]) & (index_M < last_B[:, None]) & (index_M > 0)
        return Game(emitted_B3, walk.taken_B, earlier_BM.any(axis=1) & (walk.taken_B > 1))

    with np.errstate(divide="ignore"):
        logs = [Chains(*(jnp.asarray(np.log(table), jnp.float32) for table in chains)) for chains in (target, drafter)]
    return Game(*map(np.asarray, jax.jit(play)(*logs, jax.random.key(1))))
