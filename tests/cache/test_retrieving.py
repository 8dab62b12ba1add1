"""Each query of a retrieving cache reads the chunks that the rule chooses for its place in the text, in any company."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer import SamplingParams
from jaxinfer.cache.interface import Scores
from jaxinfer.cache.layouts import RetrievalLayout, parse_layout
from jaxinfer.cache.retrieving import create_retrieving_cache
from jaxinfer.decoding.trees.tree import ancestors
from jaxinfer.errors import InvalidOption
from jaxinfer.language_model import LanguageModel
from jaxinfer.ops.masks import causal_ancestors
from tests.toys import TINY_LLAMA, float32_backend, random_params

BACKEND = float32_backend()
KV_HEADS, GROUPS, WIDTH, SLOTS = 2, 2, 16, 48
LAYOUT = RetrievalLayout(budget=8, chunk=4, recent=6)
PROMPTS, PARENTS_M = (31, 9), (0, 0, 1, 0)
SPEC = "retrieval:budget=16,chunk=8,recent=16"


def read_by_rule(query_GH, keys_SH, values_SH):
    """Return what the last of S tokens reads by the published rule, in float64; its chunks beside."""
    origin = max(len(keys_SH) - LAYOUT.recent, 0) // LAYOUT.chunk * LAYOUT.chunk
    means_CH = keys_SH[:origin].reshape(-1, LAYOUT.chunk, WIDTH).mean(axis=1)
    scores_C = means_CH @ query_GH.sum(axis=0)
    best = sorted(range(len(scores_C)), key=lambda chunk: (chunk != 0, -scores_C[chunk]))
    chunks = best[: LAYOUT.budget // LAYOUT.chunk]
    slots = [chunk * LAYOUT.chunk + at for chunk in chunks for at in range(LAYOUT.chunk)]
    slots += range(origin, len(keys_SH))
    weights_GS = np.exp(query_GH @ keys_SH[slots].T * WIDTH**-0.5)
    return weights_GS @ values_SH[slots] / weights_GS.sum(axis=1)[:, None], chunks


@pytest.mark.parametrize("by_kernels", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_each_query_reads_the_chunks_that_suit_it_best(by_kernels):
    """A prompt in chunks, then trees, of which a branch is kept, then a token; by the kernels and by XLA."""
    rng = np.random.default_rng(0)
    scores, backend = Scores(WIDTH**-0.5), replace(BACKEND, cpu_kernels=by_kernels)
    cache = create_retrieving_cache(1, 2, SLOTS, KV_HEADS, WIDTH, LAYOUT, 4, backend)
    text = [np.zeros((2, 0, KV_HEADS, WIDTH), np.float32) for _ in PROMPTS]
    found = []

    @jax.jit
    def run(cache, start_B, ancestors_BTT, counts_B, query, keys, values):
        placement = cache.place(start_B, ancestors_BTT, counts_B)
        return cache.attend(0, placement, query, keys, values, scores, backend)

    def attend(cache, start_B, ancestors_BTT, counts_B):
        """Attend from T tokens of each row, and compare those that are real with the rule."""
        num_new = ancestors_BTT.shape[1]
        new = rng.standard_normal((2, 2, num_new, KV_HEADS, WIDTH)).astype(np.float32)
        query = rng.standard_normal((2, num_new, KV_HEADS * GROUPS, WIDTH)).astype(np.float32)
        mixed_BTNH, cache = run(cache, start_B, ancestors_BTT, counts_B, query, *new)
        relation_BTT = np.broadcast_to(ancestors_BTT, (2, num_new, num_new))
        for row, node in np.ndindex(2, num_new):
            if counts_B is not None and node >= counts_B[row]:
                continue
            held = np.concatenate([text[row], new[:, row, relation_BTT[row, node]]], axis=1).astype(np.float64)
            for head in range(KV_HEADS):
                own = slice(head * GROUPS, (head + 1) * GROUPS)
                expected, chunks = read_by_rule(query[row, node, own], *held[:, :, head])
                np.testing.assert_allclose(mixed_BTNH[row, node, own], expected, atol=1e-5)
                found.append(tuple(chunks))
        return cache, new

    for start in (0, 16):
        counts_B = np.clip(np.array(PROMPTS) - start, 0, 16)
        cache, new = attend(cache, np.full(2, start), np.asarray(causal_ancestors(16))[None], counts_B)
        text = [np.concatenate([text[row], new[:, row, : counts_B[row]]], axis=1) for row in range(2)]
    for tree, path in ((PARENTS_M, (0, 1, 2)), *[(PARENTS_M, (0, 3))] * 5, ((0,), (0,))):
        start_B = np.array([held.shape[1] for held in text])
        cache, new = attend(cache, start_B, np.asarray(ancestors(jnp.array([tree] * 2))), None)
        padded = [*path, *path[-1:] * (len(tree) - len(path))]
        cache = cache.keep(jnp.asarray(start_B), jnp.array([padded] * 2), jnp.full((2,), len(path)))
        text = [np.concatenate([text[row], new[:, row, path]], axis=1) for row in range(2)]
    assert len(set(found)) > 6


@pytest.fixture(scope="module")
def models(trained_folder):
    return {cache: jaxinfer.load(trained_folder, cache=cache) for cache in ("dense", SPEC)}


@pytest.mark.slow
def test_the_seed_decides_the_text_and_neither_strategy_nor_company_does(models):
    lm = models[SPEC]
    prompts = [lm.tokenizer.encode("The quick fox followed the river.\n" * 3), lm.tokenizer.encode("The quick")]
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=3, logprobs=True)
    plain, short = lm.generate(prompts, max_new_tokens=60, sampling=sampling)
    (alone,) = lm.generate(prompts[:1], max_new_tokens=60, sampling=sampling)
    assert (alone.tokens, alone.logprobs) == (plain.tokens, plain.logprobs)
    drafted = lm.generate(prompts, max_new_tokens=60, sampling=sampling, strategy="prompt_lookup")
    assert [result.tokens for result in drafted] == [plain.tokens, short.tokens]
    assert sum(result.stats.accepted for result in drafted) > 4


@pytest.mark.exhaustive
def test_reading_everything_is_the_dense_cache_and_reading_less_is_not(models, trained_folder):
    prompt = models["dense"].tokenizer.encode("The quick fox followed the river.\n" * 3)
    everything = jaxinfer.load(trained_folder, cache="retrieval:budget=256,chunk=8,recent=16")
    found = {}
    for name, lm in {**models, "everything": everything}.items():
        (result,) = lm.generate([prompt], max_new_tokens=24, sampling=SamplingParams(logprobs=True))
        found[name] = np.array(result.logprobs)
    np.testing.assert_allclose(found["everything"], found["dense"], atol=1e-4)
    assert np.abs(found[SPEC] - found["dense"]).max() > 1e-3


def test_what_it_does_not_go_with_is_refused_by_name(tiny_llama_folder):
    assert parse_layout("retrieval:budget=32,chunk=8") == RetrievalLayout(32, 8, 64)
    for wrong in ("retrieval:budget=20", "retrieval:chunk=0", "retrieval:recent=x", "retrieval:window=3"):
        with pytest.raises(InvalidOption, match="cache retrieval"):
            parse_layout(wrong)
    with pytest.raises(InvalidOption, match="cache retrieval runs on one device"):
        jaxinfer.load(tiny_llama_folder(), cache="retrieval", mesh="data=1")
    lm = LanguageModel(TINY_LLAMA, random_params(TINY_LLAMA), BACKEND, cache=replace(LAYOUT, recent=4))
    with pytest.raises(InvalidOption, match="writes up to 11 tokens, more than recent=4"):
        lm.generate([[5, 6]], strategy="prompt_lookup")
    for strategy in ("beam", "mcts", "triforce"):
        with pytest.raises(InvalidOption, match=f"{strategy} needs the dense cache"):
            lm.generate([[5, 6]], strategy=strategy)
    with pytest.raises(InvalidOption, match="an engine has a paged cache of its own"):
        lm.engine()
