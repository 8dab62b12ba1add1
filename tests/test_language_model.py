"""Text in, text out: what generate, stream and chat promise beside the tokens themselves."""

import jax
import numpy as np
import pytest

import jaxinfer
from jaxinfer import SamplingParams
from jaxinfer.decoding.step import forward_prompt
from jaxinfer.models.decoder import create_cache, output_logits
from jaxinfer.models.model import Model
from tests.decoding.rows import LEAST_MARGIN, least_margin, request
from tests.toys import BEGIN, END, encode_bytes

PROMPT = "The old"
SAMPLED = SamplingParams(temperature=0.8, seed=5, logprobs=True)


@pytest.fixture
def lm(trained_model):
    return trained_model


@pytest.fixture(scope="module")
def random_lm(tiny_llama_folder):
    return jaxinfer.load(tiny_llama_folder())


def certain(token: int, **others) -> SamplingParams:
    """Make one token far more probable than all others."""
    return SamplingParams(logit_bias={token: 100.0}, **others)


def test_a_trained_model_continues_its_text_and_ends_by_itself(lm):
    result = lm.generate(PROMPT)[0]
    assert result.text.startswith(" ")
    assert result.text.endswith(".\n")
    assert result.finish_reason == "stop"
    assert result.tokens == (*encode_bytes(result.text), END)
    assert (result.prompt, result.stats.prompt_tokens) == (PROMPT, len(PROMPT))
    assert result.stats.new_tokens == len(result.tokens) == result.stats.steps + 1
    assert result.logprobs == ()


def test_log_probabilities_are_those_of_the_raw_logits_of_a_full_forward(lm):
    """Decoding one token at a time computes what one forward pass over the whole text does."""
    prompt = encode_bytes(PROMPT)
    sampling = SamplingParams(temperature=1.3, top_k=9, repetition_penalty=1.2, logit_bias={40: 1.0}, logprobs=True)
    (result,) = lm.generate([prompt], max_new_tokens=50, sampling=sampling)
    logits_TV = lm.logits([prompt + list(result.tokens)])[0, len(prompt) - 1 : -1]
    expected = jax.nn.log_softmax(logits_TV)[np.arange(len(result.tokens)), np.array(result.tokens)]
    assert len(result.logprobs) == len(result.tokens) > 1
    np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)


@pytest.mark.slow
def test_a_prompt_prefilled_in_chunks_equals_one_prefilled_whole(random_lm):
    """700 tokens run in chunks of 128."""
    lm, tokens = random_lm, np.random.default_rng(0).integers(2, 258, 700).tolist()
    cache = create_cache(lm.config, 1, 1024, lm.backend)
    padded_1T = jax.numpy.asarray([tokens + [0] * 324], "int32")

    @jax.jit
    def whole(params, tokens_1T, cache):
        lengths_1 = jax.numpy.array([700], "int32")
        hidden_1TD, _ = forward_prompt(Model(lm.programs.decoder, params), tokens_1T, lengths_1, cache, chunk=1024)
        return output_logits(lm.programs.decoder, params, hidden_1TD)

    expected_TV = whole(lm.params, padded_1T, cache)[0, :700]
    np.testing.assert_allclose(lm.logits([tokens])[0], expected_TV, atol=2e-4)
    (result,) = lm.generate([tokens], max_new_tokens=1)
    assert result.tokens == (int(np.argmax(expected_TV[-1])),)


def test_texts_of_unequal_length_have_the_logits_they_have_alone(lm):
    first, second = encode_bytes("The old heron"), encode_bytes("A")
    both_BTV = lm.logits([first, second])
    np.testing.assert_allclose(both_BTV[1, :1], lm.logits([second])[0], atol=1e-4)
    np.testing.assert_allclose(both_BTV[0], lm.logits([first])[0], atol=1e-4)


def test_one_new_token_needs_no_step(lm):
    (result,) = lm.generate(PROMPT, max_new_tokens=1)
    assert (len(result.tokens), result.finish_reason, result.stats.steps) == (1, "length", 0)


@pytest.mark.slow
def test_the_context_bounds_prompt_and_output_together(trained_folder):
    lm = jaxinfer.load(trained_folder, max_len=16)
    prompt = encode_bytes("The old heron watched")
    (last,) = lm.generate([prompt[:15]])
    assert (len(last.tokens), last.finish_reason) == (1, "length")
    (more,) = lm.generate([prompt[:10]], sampling=SamplingParams(ignore_eos=True))
    assert (len(more.tokens), more.finish_reason) == (6, "length")
    with pytest.raises(
        jaxinfer.errors.InvalidOption, match="the prompt has 16 tokens, but the context has room for 16"
    ):
        lm.generate([prompt[:16]])


@pytest.mark.slow
def test_a_row_may_end_with_its_first_token(lm):
    ended, other = lm.generate([PROMPT, PROMPT], sampling=[certain(END), SamplingParams()])
    assert (ended.tokens, ended.text, ended.finish_reason, ended.stats.steps) == ((END,), "", "stop", 0)
    assert other.tokens == lm.generate(PROMPT)[0].tokens


def test_ends_can_be_ignored_and_put_off(lm):
    ignoring, late = lm.generate(
        [PROMPT, PROMPT], max_new_tokens=9, sampling=[certain(END, ignore_eos=True), certain(END, min_new_tokens=4)]
    )
    assert (ignoring.tokens, ignoring.finish_reason) == ((END,) * 9, "length")
    assert len(late.tokens) == 5
    assert late.tokens.index(END) == 4
    assert late.finish_reason == "stop"


def test_a_bias_forces_and_bans_tokens(lm):
    forced, banned = lm.generate(
        [PROMPT, PROMPT],
        max_new_tokens=9,
        sampling=[certain(90), SamplingParams(logit_bias={encode_bytes(" ")[0]: -np.inf}, ignore_eos=True)],
    )
    assert forced.tokens == (90,) * 9
    assert encode_bytes(" ")[0] not in banned.tokens


def test_samples_of_a_prompt_differ_and_repeat(lm):
    three = SamplingParams(temperature=1.5, seed=5, n=3)
    first = lm.generate([PROMPT, "A small"], max_new_tokens=30, sampling=three)
    assert [result.sample for result in first] == [0, 1, 2, 0, 1, 2]
    assert [result.prompt for result in first] == [PROMPT] * 3 + ["A small"] * 3
    assert len({result.text for result in first[:3]}) == len({result.text for result in first[3:]}) == 3
    second = lm.generate(["A small", PROMPT], max_new_tokens=30, sampling=three)
    assert [result.text for result in second] == [result.text for result in first[3:] + first[:3]]
    (alone,) = lm.generate(PROMPT, max_new_tokens=30, sampling=SamplingParams(temperature=1.5, seed=5))
    assert alone.tokens == first[0].tokens
    for result in first:
        asked = request(encode_bytes(result.prompt), 30, three)
        asked = type(asked)(asked.prompt, asked.max_length, asked.sampling, result.sample)
        assert least_margin(lm, asked, result.tokens, lm.eos_token_ids) > LEAST_MARGIN


@pytest.mark.slow
def test_more_prompts_than_a_batch_holds(lm):
    """Seventeen run as sixteen and one; the padding of the second batch yields nothing."""
    prompts = [f"{PROMPT} {letter}" for letter in "abcdefghijklmnopq"]
    results = lm.generate(prompts, max_new_tokens=10, sampling=SAMPLED)
    assert [result.prompt for result in results] == prompts
    alone = [lm.generate(prompt, max_new_tokens=10, sampling=SAMPLED)[0] for prompt in (prompts[0], prompts[16])]
    assert [result.tokens for result in alone] == [results[0].tokens, results[16].tokens]
    asked = [request(encode_bytes(result.prompt), 10, SAMPLED) for result in alone]
    assert min(least_margin(lm, *one) for one in zip(asked, [result.tokens for result in alone])) > LEAST_MARGIN


@pytest.mark.slow
def test_other_sampling_parameters_compile_nothing(lm):
    """Another number of rows does: one that no other test has."""
    lm.generate(PROMPT, max_new_tokens=20)
    compiled = lm.programs.compilations
    for sampling in (
        SAMPLED,
        SamplingParams(temperature=2.0, top_k=3, top_p=0.5, min_p=0.1, seed=2**63 - 1),
        SamplingParams(repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=1.0),
        certain(END, min_new_tokens=7, logprobs=True),
        SamplingParams(stop=["fox"], ignore_eos=True),
    ):
        lm.generate("A small", max_new_tokens=11, sampling=sampling)
    assert lm.programs.compilations == compiled
    lm.generate([PROMPT] * 5, max_new_tokens=20)
    assert lm.programs.compilations == compiled + 2


def test_a_stop_string_cuts_the_text_and_the_tokens(lm):
    """The string spans many tokens; the text ends before it, the tokens with the one that completes it."""
    whole = lm.generate(PROMPT)[0]
    stop = whole.text[8:13]
    (cut,) = lm.generate(PROMPT, sampling=SamplingParams(stop=[stop, "never"]))
    end = whole.text.index(stop)
    assert (cut.text, cut.finish_reason) == (whole.text[:end], "stop")
    assert cut.tokens == whole.tokens[: end + len(stop)]
    assert cut.stats.new_tokens == len(cut.tokens)
    # The host looks every few steps, and what was decoded until then is counted.
    assert len(cut.tokens) - 1 < cut.stats.steps <= len(cut.tokens) + 8


@pytest.mark.slow
def test_a_stop_string_of_one_row_leaves_the_others_alone(lm):
    whole = lm.generate(PROMPT)[0]
    both = lm.generate([PROMPT, PROMPT], sampling=[SamplingParams(stop=whole.text[3:5]), SamplingParams()])
    assert [both[0].text, both[1].text] == [whole.text[:3], whole.text]
    assert both[1].finish_reason == "stop"


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SAMPLED, SamplingParams(stop=["the ", "n"])], ids=["greedy", "sampled", "stop"]
)
@pytest.mark.parametrize("kind", ["lm", "random_lm"])
def test_streamed_pieces_join_to_the_generated_text(kind, sampling, request):
    """A random model writes bytes that are no text, which must come out the same way too."""
    lm = request.getfixturevalue(kind)
    (expected,) = lm.generate(PROMPT, max_new_tokens=40, sampling=sampling)
    pieces = list(lm.stream(PROMPT, max_new_tokens=40, sampling=sampling))
    assert "".join(piece.text for piece in pieces) == expected.text
    assert tuple(token for piece in pieces for token in piece.tokens) == expected.tokens
    assert tuple(value for piece in pieces for value in piece.logprobs) == expected.logprobs
    assert len(pieces) > 2
    assert [piece.result is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    final = pieces[-1].result
    assert (final.text, final.tokens, final.logprobs) == (expected.text, expected.tokens, expected.logprobs)


def test_chat_renders_the_template_and_answers(lm):
    messages = [{"role": "user", "content": "What did the fox do?"}]
    rendered = "user: What did the fox do?\nassistant: "
    assert lm.encode_chat(messages) == encode_bytes(rendered)
    reply = lm.chat(messages, max_new_tokens=12)
    assert reply.tokens == lm.generate([encode_bytes(rendered)], max_new_tokens=12)[0].tokens
    assert "".join(piece.text for piece in lm.stream_chat(messages, max_new_tokens=12)) == reply.text


def test_special_tokens_in_a_prompt_are_parsed_and_never_shown(lm):
    (result,) = lm.generate("<|begin|>The", max_new_tokens=4, sampling=certain(BEGIN))
    assert result.stats.prompt_tokens == 4
    assert (result.tokens, result.text) == ((BEGIN,) * 4, "")
