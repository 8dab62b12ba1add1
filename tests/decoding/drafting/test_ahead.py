"""Drafts made ahead are those that the text would get afterwards, and are used just where every row went that way."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.cache.interface import LayeredCache
from jaxinfer.decoding.ahead.step import draft_ahead, next_chain, seen_by_drafter, start_ahead
from jaxinfer.decoding.registry import parse_strategy
from jaxinfer.decoding.state import DecodeState, initial_state
from jaxinfer.decoding.strategies.draft_model import DraftModel, DraftModelMemory
from jaxinfer.decoding.strategy import Prefilled, Proposal
from jaxinfer.decoding.trees.tree import chain
from jaxinfer.errors import InvalidOption
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.model import Model
from jaxinfer.parallel.mesh import MeshConfig
from jaxinfer.parallel.partitioner import Partitioner
from jaxinfer.sampling import sampling_arrays
from tests.decoding.strategy_cases import perturbed
from tests.toys import TINY_LLAMA, float32_backend, random_params

COUNT, SLOTS = 3, 64


def after(token: Any, length: Any) -> Any:
    """Return what the drafter says after a text: by its last token and its length."""
    return (3 * token + length) % 251


@dataclass(frozen=True)
class ByRule(DraftModel):
    """Draft by the rule; the cache counts the passes."""

    def start(self, model: Model, params: Any, state: DecodeState, prefilled: Prefilled) -> DraftModelMemory:
        return DraftModelMemory(LayeredCache((jnp.int32(0),)), None)  # pyright: ignore[reportArgumentType]

    def propose(self, model: Model, params: Any, state: DecodeState, memory: DraftModelMemory) -> Proposal:
        tokens = [jnp.take_along_axis(state.tokens_BS, state.lengths_B[:, None] - 1, axis=1)[:, 0]]
        for depth in range(self.max_depth):
            tokens.append(after(tokens[-1], state.lengths_B + depth))
        tokens_BM = jnp.stack(tokens, axis=1)
        valid_BM = jnp.broadcast_to(~state.finished_B[:, None], tokens_BM.shape)
        (passes,) = memory.cache.parts
        cache = LayeredCache((passes + 1,))  # pyright: ignore[reportArgumentType]
        return Proposal(chain(tokens_BM, valid_BM), DraftModelMemory(cache, memory.lengths))


# Of each round and row: how many drafts the target takes, and whether what it adds is what was guessed.
ROUNDS = [
    [(3, True), (3, True)],
    [(3, True), (3, False)],
    [(3, True), (2, True)],
    [(3, True), (3, True)],
    [(0, True), (3, True)],
    [(3, True), (3, True)],
    [(3, True), (3, True)],
]


def test_chains_are_those_of_the_text_whether_made_ahead_or_not():
    texts = [[5, 9, 30], [7]]
    strategy, decoder = ByRule(num_draft_tokens=COUNT, devices=1), Decoder(TINY_LLAMA, float32_backend())
    sampling = sampling_arrays([SamplingParams()] * 2, [0, 0], (), TINY_LLAMA.vocab_size)
    state = seen_by_drafter(initial_state(texts, [60, 60], SLOTS, COUNT, LayeredCache(()), sampling))
    ahead = start_ahead(decoder, strategy, 16, {}, state)
    follow, go_on = (jax.jit(partial(step, decoder, strategy, {})) for step in (next_chain, draft_ahead))
    reused, passes, all_taken = np.zeros(2, int), 0, False
    for number, taken in enumerate(ROUNDS):
        is_over = np.array([number == len(ROUNDS) - 1, False])
        tokens_BS = np.array([text + [0] * (SLOTS - len(text)) for text in texts])
        lengths_B = jnp.array([len(text) for text in texts])
        state = state._replace(tokens_BS=jnp.array(tokens_BS), lengths_B=lengths_B, finished_B=jnp.array(is_over))
        found, ahead = follow(state, ahead)
        reused, passes = reused + (all_taken & ~is_over), passes + (not all_taken)
        for row, text in enumerate(texts):
            expected = [text[-1]]
            for depth in range(COUNT):
                expected.append(int(after(expected[-1], len(text) + depth)))
            assert found.drafted_BM[row].tolist() == [True] + [not is_over[row]] * COUNT
            if not is_over[row]:
                assert found.tokens_BM[row].tolist() == expected
            count, is_guessed = taken[row]
            text += expected[1 : count + 1]
            text.append(int(after(text[-1], len(text)) + (not is_guessed)) % 251)
        assert ahead.reused_B.tolist() == reused.tolist()
        assert int(ahead.cache.parts[0]) == passes  # pyright: ignore[reportArgumentType]
        ahead, passes = go_on(state, ahead), passes + 1
        all_taken = all(each == (3, True) for each in taken)
    assert reused.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("spec", "mend"),
    [
        ("model=self,devices=1", "model=self is where the target is"),
        ("model=x,devices=1,tree=3.2", "tree=3.2 does not go with devices=.*leave tree= out"),
        ("model=x,devices=1,schedule=bass", "leave schedule= out"),
        ("model=x,devices=1,verify=rejection", "leave verify= out"),
        ("model=x,devices=-1", "devices=-1"),
        ("model=x,devices=1+prompt_lookup", "devices= drafts alone"),
    ],
)
def test_what_does_not_go_with_devices_is_refused_in_a_line(spec, mend):
    with pytest.raises(InvalidOption, match=mend):
        parse_strategy(f"draft_model:{spec}")


@pytest.mark.slow
def test_texts_are_those_of_plain_decoding():
    """On the target's own device, where nothing runs at the same time: `tests.parallel.on_devices` has others."""
    config, backend = replace(TINY_LLAMA, num_layers=1), float32_backend()
    lm = LanguageModel(config, random_params(config), backend)
    sampling = [SamplingParams(), SamplingParams(temperature=1.3, top_p=0.5, repetition_penalty=1.2, seed=7)]
    prompts, place = [[1, 70, 80, 90], [3]], Partitioner(MeshConfig().build(jax.devices()[:1]))
    own = {"config": config, "backend": backend, "params": perturbed(lm.params, 0.1)}
    ahead = DraftModel(num_draft_tokens=3, devices=1, place=place, **own)
    plain = lm.generate(prompts, max_new_tokens=20, sampling=sampling)
    found = lm.generate(prompts, max_new_tokens=20, sampling=sampling, strategy=ahead)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert 0 < sum(one.stats.accepted for one in found) < sum(one.stats.drafted for one in found)
    forced = SamplingParams(logit_bias={44: 1000.0})
    for one in lm.generate(prompts, max_new_tokens=20, sampling=forced, strategy=ahead):
        assert one.tokens == (44,) * 20
        assert one.stats.drafted_ahead == one.stats.steps - 1 > 0
