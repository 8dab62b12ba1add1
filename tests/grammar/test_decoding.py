"""With a grammar, too, the strategy decides only the speed; every text follows it, whatever else is asked."""

import re
from dataclasses import replace

import pytest

from jaxinfer.errors import InvalidOption
from jaxinfer.grammar import Grammar
from jaxinfer.model_loading import load
from jaxinfer.sampling import SamplingParams
from tests.toys import encode_bytes

PROMPTS = ["The quick", "One grey fox", "A small", "The old heron watched"]
# Sentences with a name that nobody can guess; any words; one of two texts; and no grammar.
PATTERNS = (r"The (fox|owl) Xanthippe (saw|ate)( [a-z]{1,5}){2,3}\.", r"[A-Z][a-z ]*\.", "(yes|no)")
SAMPLINGS = (
    SamplingParams(grammar=Grammar.regex(PATTERNS[0]), logprobs=True),
    SamplingParams(grammar=Grammar.regex(PATTERNS[1]), temperature=0.9, seed=3, top_p=0.95, logprobs=True),
    SamplingParams(grammar=Grammar.choice(["yes", "no"]), temperature=1.3, seed=5, logprobs=True),
    SamplingParams(temperature=0.8, seed=1, logprobs=True),
)


@pytest.fixture(scope="module")
def lm(trained_folder):
    return load(trained_folder)


@pytest.fixture(scope="module")
def alone(lm):
    asked = zip(PROMPTS, SAMPLINGS)
    return [lm.generate([prompt], max_new_tokens=60, sampling=one)[0] for prompt, one in asked]


def of(results):
    return [(one.tokens, one.logprobs, one.finish_reason) for one in results]


def test_texts_follow_their_grammar(alone):
    for result, pattern in zip(alone, PATTERNS):
        assert result.finish_reason == "stop"
        assert re.fullmatch(pattern, result.text)
    assert alone[3].finish_reason == "length"


@pytest.mark.parametrize(
    "strategy",
    [
        "prompt_lookup",
        pytest.param("token_recycling", marks=pytest.mark.exhaustive),
        pytest.param("jacobi", marks=pytest.mark.exhaustive),
        pytest.param("layerskip:exit_layer=1", marks=pytest.mark.exhaustive),
        pytest.param("token_recycling+prompt_lookup", marks=pytest.mark.exhaustive),
        pytest.param("triforce:budget=32,chunk=8,window=16", marks=pytest.mark.exhaustive),
    ],
)
def test_no_strategy_changes_a_bit(lm, alone, strategy):
    found = lm.generate(PROMPTS, max_new_tokens=60, sampling=SAMPLINGS, strategy=strategy)
    assert of(found) == of(alone)
    assert sum(result.stats.accepted for result in found) > 0


def test_a_token_that_must_come_is_a_draft_that_cannot_fail(lm):
    sampling = SamplingParams(grammar=Grammar.regex("Xanthippe, Xerxes"), temperature=1.0)
    (found,) = lm.generate(["The old"], max_new_tokens=60, sampling=sampling, strategy="prompt_lookup")
    stats = found.stats
    assert found.text == "Xanthippe, Xerxes"
    # Its last token is the one that ends the text, and no other may come either.
    assert stats.accepted == stats.drafted
    assert stats.tokens_per_step > 3


@pytest.mark.slow
def test_the_engine_keeps_to_grammars_while_requests_come_and_go(lm, alone):
    """Rows are few, so that requests wait, and pages too, so that some are computed anew."""
    options = {"strategy": "prompt_lookup", "preemption": "recompute", "drafting": "always"}
    with lm.engine(max_rows=3, page_size=8, pages=15, **options) as engine:
        asked = [
            engine.submit(prompt, max_new_tokens=60, sampling=one, priority=priority)
            for priority, (prompt, one) in enumerate(list(zip(PROMPTS, SAMPLINGS)) * 2)
        ]
        results = [request.result(120.0) for request in asked]
        assert engine.metrics().preemptions > 0
    assert of(results) == of(alone * 2)


def test_no_step_asks_the_host(lm):
    """The loop over all steps is one program, without a way out to the host."""
    lm.generate(PROMPTS, max_new_tokens=60, sampling=SAMPLINGS, strategy="prompt_lookup")
    texts = [program.as_text() for key, program in lm.programs.live.items() if key[0][0] == "decode"]
    assert len(texts) > 1
    for text in texts:
        targets = re.findall(r'custom_call_target="([^"]*)"', text)
        assert targets
        assert all(name.startswith("jaxinfer_") for name in targets)
        assert not re.search(r" (infeed|outfeed|send|recv|copy-start)\(|host_compute|callback", text)


def test_what_may_come_outweighs_a_ban(lm):
    no, yes = (encode_bytes(text)[0] for text in ("n", "y"))
    sampling = SamplingParams(grammar=Grammar.choice(["yes", "no"]), logit_bias={no: -1000.0})
    (found,) = lm.generate(["The old"], max_new_tokens=9, sampling=sampling)
    assert found.text == "yes"
    banned = replace(sampling, logit_bias={no: float("-inf"), yes: float("-inf")}, temperature=1.0)
    (found,) = lm.generate(["The old"], max_new_tokens=9, sampling=banned)
    assert found.text in ("yes", "no")


@pytest.mark.parametrize("option", [{"min_new_tokens": 3}, {"ignore_eos": True}])
def test_what_would_not_let_a_text_end_is_refused(option):
    with pytest.raises(InvalidOption, match="ends the text"):
        SamplingParams(grammar=Grammar.regex("a"), **option)


def test_beam_search_is_refused(lm):
    with pytest.raises(InvalidOption, match="beam search follows no grammar"):
        lm.generate(["The old"], max_new_tokens=9, sampling=SAMPLINGS[0], strategy="beam:width=2")
    with pytest.raises(InvalidOption, match=r"not valid: use a jaxinfer\.Grammar"):
        SamplingParams(grammar="a+")  # pyright: ignore[reportArgumentType]
