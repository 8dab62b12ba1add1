"""Tree search asks about the texts it should, chooses as its policy says, and leaves each row to its own seed."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxinfer
from jaxinfer import Candidate, LanguageModel, SamplingParams
from jaxinfer.checkpoint.value_head import write_value_head
from jaxinfer.decoding.strategies.mcts import TreeSearch
from jaxinfer.errors import InvalidOption, JaxinferError
from jaxinfer.models.config import LayerKind, Rope
from jaxinfer.models.value_head import init_value_head
from jaxinfer.text_scores import value_text
from tests.toy_adapters import write_adapter
from tests.toys import END, TINY_LLAMA, float32_backend, random_params

# One layer, as programs are most of the cost: a search runs the model in three places.
TOY = replace(TINY_LLAMA, num_layers=1)
DEPTH, SIMULATIONS, ACTIONS = 3, 8, 4
SEARCH = TreeSearch(simulations=SIMULATIONS, actions=ACTIONS, depth=DEPTH)
PROMPTS = [[1, 70, 80, 90], [1, 5, 6, 7, 8, 9, 10], [3], [200, 100]]
# A repetition counts in the prompt as it does in the output, so that a path may be either.
SAMPLINGS = [
    SamplingParams(logprobs=True),
    SamplingParams(temperature=0.9, seed=5, repetition_penalty=1.3, logprobs=True),
    SamplingParams(temperature=1.2, top_k=20, seed=6, logprobs=True),
    SamplingParams(temperature=0.7, top_p=0.8, seed=7, logprobs=True),
]


def evens(candidates: Sequence[Candidate]) -> list[float]:
    """Prefer even tokens."""
    return [sum(token % 2 == 0 for token in one.tokens) / len(one.tokens) for one in candidates]


def indifferent(candidates: Sequence[Candidate]) -> list[float]:
    return [0.25] * len(candidates)


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return LanguageModel(TOY, random_params(TOY), float32_backend())


def written(lm: LanguageModel, strategy: TreeSearch | str = SEARCH, value: Callable | None = evens, **options):
    asked = {"max_new_tokens": 6, "sampling": SAMPLINGS, **options}
    return lm.generate(PROMPTS, strategy=strategy, value=value, **asked)


@pytest.fixture(scope="module")
def plain(lm):
    return written(lm, "autoregressive", None)


def recorded(lm: LanguageModel, strategy: TreeSearch = SEARCH, value: Callable = evens, **options):
    """Return the results, and what was asked of each prompt, search by search."""
    asked: dict[tuple[int, ...], list[tuple[Candidate, float]]] = {tuple(prompt): [] for prompt in PROMPTS}

    def recording(candidates: list[Candidate]) -> list[float]:
        values = value(candidates)
        for one, worth in zip(candidates, values):
            asked[one.prompt_tokens].append((one, worth))
        return values

    results, size = written(lm, strategy, recording, **options), 1 + strategy.simulations
    searches = {key: [of[at : at + size] for at in range(0, len(of), size)] for key, of in asked.items()}
    return results, [searches[tuple(prompt)] for prompt in PROMPTS]


@pytest.mark.parametrize(
    "policy", [pytest.param("gumbel", marks=pytest.mark.slow), pytest.param("puct", marks=pytest.mark.exhaustive)]
)
def test_a_value_that_is_the_same_for_all_texts_leaves_the_text_of_plain_decoding(lm, plain, policy):
    """For Gumbel at any temperature, in every bit; PUCT draws among the few tokens that it tries."""
    found = written(lm, replace(SEARCH, policy=policy), indifferent)
    rows = range(len(PROMPTS)) if policy == "gumbel" else [0]
    assert [found[row].tokens for row in rows] == [plain[row].tokens for row in rows]
    assert [found[row].logprobs for row in rows] == [plain[row].logprobs for row in rows]


@pytest.mark.parametrize("policy", ["gumbel", pytest.param("puct", marks=pytest.mark.exhaustive)])
def test_texts_are_worth_more_than_plain_ones_and_are_each_rows_own(lm, plain, policy):
    strategy = replace(SEARCH, policy=policy)
    found, compiled = written(lm, strategy), lm.programs.compilations
    # PUCT, with two visits a token, leans on the model more.
    assert sum(evens(found)) > sum(evens(plain)) + (1 if policy == "gumbel" else 0.2)
    turned = lm.generate(PROMPTS[::-1], max_new_tokens=6, sampling=SAMPLINGS[::-1], strategy=strategy, value=evens)
    assert [(one.tokens, one.logprobs) for one in turned[::-1]] == [(one.tokens, one.logprobs) for one in found]
    others = [PROMPTS[0], *PROMPTS[2:], PROMPTS[1]]
    beside = lm.generate(others, max_new_tokens=6, sampling=[SAMPLINGS[0]] * 4, strategy=strategy, value=evens)
    assert beside[0].tokens == found[0].tokens
    other_value = written(lm, strategy, lambda candidates: [-worth for worth in evens(candidates)])
    assert other_value[1].tokens != found[1].tokens
    assert lm.programs.compilations == compiled


def test_every_search_asks_about_plain_continuations_of_new_nodes(lm):
    """The first of its texts begins at the root, each other one behind a child of a node that was there before."""
    found, searches = recorded(lm)
    for row, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS)):
        tokens = list(found[row].tokens)
        assert len(searches[row]) == len(tokens)
        for at, asked in enumerate(searches[row]):
            known: dict[tuple[int, ...], int] = {}
            for one, _ in asked:
                assert list(one.tokens[:at]) == tokens[:at]
                depth = len(one.tokens) - at - (0 if one.is_whole else DEPTH)
                if not one.is_whole:
                    path = one.tokens[at : at + depth]
                    assert (path == ()) == (not known)
                    assert path == () or path[:-1] in known
                    assert path not in known
                    known[path] = 0
                    if path:
                        known[path[:-1]] += 1
            assert all(count <= ACTIONS for count in known.values())
        one = next(one for one, _ in searches[row][0][::-1] if not one.is_whole)
        path = [*prompt, *one.tokens[: len(one.tokens) - DEPTH]]
        assert len(path) > len(prompt)
        after = lm.generate([path] * 4, max_new_tokens=DEPTH, sampling=[sampling] * 4)[0]
        assert one.tokens[-DEPTH:] == after.tokens


@pytest.mark.slow
def test_of_children_seen_once_the_likeliest_text_and_the_value_of_its_continuation_decide(lm):
    """Against the policy in a few lines: with as many simulations as actions, each child is seen once."""
    strategy = TreeSearch(simulations=ACTIONS, actions=ACTIONS, depth=1)
    found = written(lm, strategy, None, sampling=SamplingParams(), max_new_tokens=2)
    count = 0
    for prompt, result in zip(PROMPTS, found):
        log_p_V = _log_p(lm, [prompt])[0]
        tried = np.argsort(-log_p_V)[:ACTIONS].tolist()
        after_AV = _log_p(lm, [[*prompt, token] for token in tried])
        worth_A = (log_p_V[tried] + after_AV.max(axis=-1)) / 2
        # Values count from 0 to 1, times 0.1 for each of 50 visits and those that there were.
        scaled_A = 5.1 * (worth_A - worth_A.min()) / (worth_A.max() - worth_A.min())
        scores_A = log_p_V[tried] + scaled_A
        assert np.diff(np.sort(scores_A))[-1] > 1e-3
        assert result.tokens[0] == tried[scores_A.argmax()]
        count += result.tokens[0] != tried[0]
        assert (result.stats.steps, result.stats.target_passes) == (
            2,
            1 + ACTIONS + 1,
        )  # the last token's children have ended
    assert count


def _log_p(lm: LanguageModel, texts: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the log-probabilities after each of up to four texts of one length."""
    padded = [*texts, *[[1] * len(texts[0])] * (4 - len(texts))]
    logits_BV = np.asarray(lm.logits(padded), np.float64)[: len(texts), -1]
    return logits_BV - np.logaddexp.reduce(logits_BV, axis=-1, keepdims=True)


def test_a_search_ends_a_text_where_that_is_worth_most(lm):
    """Nothing else is worth anything here, so an end counts for itself; texts that have ended are not continued."""

    def ends_at_once(candidates: list[Candidate]) -> list[float]:
        return [float(one.tokens == (END,)) for one in candidates]

    # Likely enough to be among those tried, not to be drawn.
    sampling = [SamplingParams(logit_bias={END: bias}) for bias in (6.0, 2.8, 5.5, 3.0)]
    drawn = written(lm, "autoregressive", None, sampling=sampling)
    found, searches = recorded(lm, value=ends_at_once, sampling=sampling)
    assert all(result.tokens[0] != END for result in drawn)
    assert [(result.tokens, result.finish_reason) for result in found] == [((END,), "stop")] * 4
    whole = [one for asked in searches for search in asked for one, _ in search if one.is_whole]
    assert all((one.tokens[-1] == END) or len(one.tokens) == 6 for one in whole)
    assert all(END not in one.tokens[:-1] for one in whole)


@pytest.mark.slow
def test_a_value_head_reads_the_last_token_of_each_text_but_no_stop_token(lm, tmp_path):
    """A search by it is the search by a function that asks it about the same texts, of which some have ended."""
    head, asked = init_value_head(TOY.model_dim, 16, jax.random.key(1)), tmp_path / "value"
    write_value_head(asked, {**head, "out": {**head["out"], "kernel": jax.random.normal(jax.random.key(2), (1, 16))}})
    sampling = [replace(one, logit_bias={END: bias}) for one, bias in zip(SAMPLINGS, (6.0, 2.8, 5.5, 3.0))]

    def by_texts(candidates: list[Candidate]) -> list[float]:
        texts = [[*one.prompt_tokens, *one.tokens] for one in candidates]
        return [value_text(lm, text[:-1] if text[-1] == END else text, asked)[-1] for text in texts]

    expected, searches = recorded(lm, value=by_texts, sampling=sampling)
    found = written(lm, replace(SEARCH, value=str(asked)), None, sampling=sampling)
    assert [(one.tokens, one.logprobs) for one in found] == [(one.tokens, one.logprobs) for one in expected]
    ends = [one for asked in searches for search in asked for one, _ in search if one.tokens[-1:] == (END,)]
    assert any(len(one.tokens) < DEPTH for one in ends)


def test_what_a_function_raises_or_returns_wrongly_comes_out_as_it_is(lm):
    class Broken(Exception):
        pass

    def fails(candidates: list[Candidate]) -> list[float]:
        raise Broken("here")

    with pytest.raises(Broken, match="here"):
        written(lm, value=fails)
    for wrong, told in (
        (lambda candidates: [1.0], "1 numbers for 4 candidates"),
        (lambda candidates: 3, "returned 3, not a number for each"),
        (lambda candidates: [float("nan")] * len(candidates), "not finite"),
    ):
        with pytest.raises(InvalidOption, match=told):
            written(lm, value=wrong)
    assert written(lm)[0].tokens == written(lm)[0].tokens


REFUSED = {
    "no simulation": ("mcts:simulations=0", None, "mcts: simulations=0 is not a whole number from 1"),
    "no action": ("mcts:actions=0", None, "mcts: actions=0"),
    "another policy": ("mcts:policy=best", None, "policy of strategy mcts is one of gumbel, puct"),
    "more tokens than it sees": ("mcts:depth=2,tokens=3", None, "tokens=3 is more than the depth=2"),
    "more actions than tokens": ("mcts:actions=300", None, "actions=300 is more than the 258 tokens"),
    "a value for no search": ("prompt_lookup", evens, "value: strategy prompt_lookup asks for no values: use mcts"),
    "no head": ("mcts:value=nowhere", None, "nowhere: no such folder of a value head"),
    "two values": ("mcts:value=nowhere", evens, "value=nowhere and a function both say what texts are worth"),
    "nothing to value": ("mcts:depth=0", None, "depth=0 leaves a text as it is"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(lm, case):
    spec, value, told = REFUSED[case]
    with pytest.raises(JaxinferError, match=re.escape(told)) as refused:
        lm.generate([[5]], strategy=spec, value=value)
    assert len(str(refused.value).splitlines()) == 1


def test_a_value_is_a_function_that_can_be_told_from_others():
    unhashable = type("Unhashable", (), {"__call__": evens, "__hash__": None})()
    with pytest.raises(InvalidOption, match="is no function, or none that can be told from others"):
        TreeSearch(scorer=unhashable)


def test_without_mctx_the_package_to_install_is_named(monkeypatch):
    monkeypatch.setattr("jaxinfer.decoding.strategies.mcts.find_spec", lambda name: None)
    fresh = LanguageModel(TOY, random_params(TOY), float32_backend())
    with pytest.raises(InvalidOption, match=re.escape("pip install 'jaxinfer[search]'")):
        fresh.generate([[5]], strategy="mcts")


@pytest.mark.exhaustive
def test_a_search_for_several_tokens_takes_the_best_text_that_it_saw(lm):
    found, searches = recorded(lm, replace(SEARCH, tokens=2))
    for row, result in enumerate(found):
        assert len(searches[row]) == result.stats.steps == 3
        for at, asked in enumerate(searches[row]):
            best = max(worth for _, worth in asked)
            first = next(one for one, worth in asked if np.float32(worth) == np.float32(best))
            assert result.tokens[: 2 * at + 2] == first.tokens[: 2 * at + 2]
        assert result.stats.tokens_per_step == 2


@pytest.mark.exhaustive
def test_a_row_searches_with_its_own_adapter(tmp_path, lm):
    """In its candidates too: as where all rows have it, in every bit, and other rows as where none has one."""
    model = LanguageModel(TOY, lm.params, float32_backend())
    model.load_adapter("own", write_adapter(tmp_path / "own", TOY, seed=3))
    adapters = [None, "own", None, "own"]
    found, searches = recorded(model, adapter=adapters)
    nowhere, everywhere = recorded(lm), recorded(model, adapter=["own"] * 4)
    for row, name in enumerate(adapters):
        results, asked = everywhere if name else nowhere
        assert (found[row].tokens, found[row].logprobs) == (results[row].tokens, results[row].logprobs)
        assert searches[row] == asked[row]
        assert everywhere[1][row] != nowhere[1][row]
    texts = written(model, value=indifferent, adapter=adapters)
    plainly = model.generate(PROMPTS, max_new_tokens=6, sampling=SAMPLINGS, adapter=adapters)
    assert [(one.tokens, one.logprobs) for one in texts] == [(one.tokens, one.logprobs) for one in plainly]


@pytest.mark.exhaustive
def test_layers_with_a_window_see_the_window_of_each_node():
    kinds = LayerKind(Rope(10000.0, 8), window=4), LayerKind(Rope(10000.0, 8))
    config = replace(TINY_LLAMA, layer_pattern=kinds)
    lm = LanguageModel(config, random_params(config), float32_backend())
    plain, found = written(lm, "autoregressive", None), written(lm, value=indifferent)
    assert [(one.tokens, one.logprobs) for one in found] == [(one.tokens, one.logprobs) for one in plain]
    _, searches = recorded(lm, max_new_tokens=DEPTH + 3)
    one = next(one for one, _ in searches[1][0][::-1] if not one.is_whole)
    path = [*PROMPTS[1], *one.tokens[: len(one.tokens) - DEPTH]]
    after = lm.generate([path] * 4, max_new_tokens=DEPTH, sampling=[SAMPLINGS[1]] * 4)[0]
    assert one.tokens[-DEPTH:] == after.tokens


@pytest.mark.exhaustive
def test_texts_stream_token_by_token_to_a_stop_string_and_follow_a_grammar(trained_folder):
    lm = jaxinfer.load(trained_folder, max_len=96)
    seen: list[Candidate] = []

    def short(candidates: list[Candidate]) -> list[float]:
        seen.extend(candidates)
        return [-float(len(one.text)) for one in candidates]

    asked = {"max_new_tokens": 12, "strategy": SEARCH, "value": short}
    pieces = list(lm.stream("The quick fox", sampling=SamplingParams(stop=("e",), ignore_eos=True), **asked))
    assert sum(bool(piece.tokens) for piece in pieces) > 1
    result = pieces[-1].result
    assert result is not None
    assert "".join(piece.text for piece in pieces) == result.text
    assert "e" not in result.text
    assert all("e" not in one.text and one.prompt == "The quick fox" for one in seen)
    sampling = SamplingParams(grammar=jaxinfer.Grammar.regex("[a-d]{3}[0-9]{2}"))
    (found,) = lm.generate("The quick fox", sampling=sampling, **asked)
    assert re.fullmatch("[a-d]{3}[0-9]{2}", found.text)
