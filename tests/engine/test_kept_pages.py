"""What is kept from call to call changes no bit, and is not computed again."""

import threading

import pytest

import jaxinfer
from jaxinfer import SamplingParams
from jaxinfer.errors import InvalidOption
from tests.toys import encode_bytes

SAME = ("text", "tokens", "logprobs", "finish_reason", "sample")
SAMPLING = SamplingParams(temperature=0.8, seed=4, logprobs=True)
STORY = "The old man and the small otter went to the river, where one grey fox sat on a stone. " + "It was cold. " * 4


@pytest.fixture(scope="module")
def plain(trained_folder):
    return jaxinfer.load(trained_folder, max_len=256)


@pytest.fixture
def lm(plain):
    """The model, with nothing kept."""
    if not plain.programs.decoder.backend.keeps_bits:
        with pytest.raises(InvalidOption, match="prefix"):
            plain.prefix(STORY)
        pytest.skip("no kernels of our own for this processor")
    plain.__dict__.pop("_kept_pages", None)
    return plain


def fields(results):
    return [[getattr(one, name) for name in SAME] for one in results]


def computed(lm):
    """Return how many prompt tokens the kept pages had to compute, and how many they found."""
    counters = lm._kept_pages._core.counters
    return counters.prompt_tokens, counters.cached_tokens


def test_a_conversation_computes_what_is_new_in_its_next_turn(lm):
    messages = [{"role": "user", "content": STORY}]
    lm.chat(messages, max_new_tokens=8)
    # Nobody knows yet that it goes on.
    assert "_kept_pages" not in lm.__dict__
    for question in ("And the fox?", "The end?"):
        (answer,) = lm.generate([lm.encode_chat(messages)], max_new_tokens=8, sampling=SAMPLING)
        messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": question}]
        (expected,) = lm.generate([lm.encode_chat(messages)], max_new_tokens=8, sampling=SAMPLING)
        found = lm.chat(messages, max_new_tokens=8, sampling=SAMPLING)
        assert fields([found]) == fields([expected])
    length = len(lm.encode_chat(messages))
    prompt_tokens, cached = computed(lm)
    assert cached >= 128
    assert prompt_tokens + cached == length + len(lm.encode_chat(messages[:-2]))
    pieces = list(lm.stream_chat(messages, max_new_tokens=8, sampling=SAMPLING))
    assert fields([pieces[-1].result]) == fields([expected])
    assert "".join(piece.text for piece in pieces) == expected.text
    assert computed(lm)[0] - prompt_tokens < 64


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("autoregressive", marks=pytest.mark.slow),
        pytest.param("prompt_lookup", marks=pytest.mark.exhaustive),
    ],
)
def test_prompts_begin_with_a_prefix_that_is_held(lm, strategy):
    prompts = [STORY + end for end in ("A", "The fox", "One", "He")]
    options = {"max_new_tokens": 10, "sampling": SAMPLING, "strategy": strategy}
    expected = [lm.generate(prompt, **options)[0] for prompt in prompts]
    with lm.prefix(STORY, strategy=strategy) as prefix:
        assert prefix.tokens == len(encode_bytes(STORY))
        assert fields(lm.generate(prompts, batch_size=1, **options)) == fields(expected)
        assert computed(lm) == (sum(map(len, map(encode_bytes, prompts))) - 3 * prefix.tokens, 4 * prefix.tokens)
        *_, last = lm.stream(prompts[2], **options)
        assert fields([last.result]) == fields(expected[2:3])
        # Whatever has to begin anew computes the prefix again.
        lm._kept_pages._core = None
        assert fields(lm.generate(prompts[:2], batch_size=1, **options)) == fields(expected[:2])
        assert computed(lm)[1] == 2 * prefix.tokens
    before = computed(lm)
    assert fields(lm.generate(prompts[:1], **options)) == fields(expected[:1])
    assert computed(lm) == before
    assert lm._kept_pages._core.scheduler.held.pool.in_use == 0


def test_windows_are_long_unless_somebody_reads_along(lm):
    lm.generate("A", max_new_tokens=4, reuse=True)
    device, windows = lm._kept_pages._core._device, []
    start, lm._kept_pages._core._step_seconds = device.start, 1e-3

    def watched(slots, pages, max_steps, nodes):
        windows.append(max_steps)
        return start(slots, pages, max_steps, nodes)

    device.start = watched
    asked = {"max_new_tokens": 60, "sampling": SamplingParams(ignore_eos=True), "reuse": True}
    (expected,) = lm.generate("The old man", **asked)
    assert windows[0] == 32
    windows.clear()
    *pieces, last = lm.stream("The old man", **asked)
    assert set(windows) <= set(range(1, 9))
    assert len(pieces) >= 6
    assert last.result.tokens == expected.tokens
    # A step that takes long is looked at soon.
    windows.clear()
    lm._kept_pages._core._step_seconds = 0.1
    lm.generate("The old man", **asked)
    assert windows[0] == 8


@pytest.mark.slow
def test_windows_are_short_while_prompts_come(lm):
    asked = {"max_new_tokens": 40, "sampling": SamplingParams(ignore_eos=True), "reuse": True}
    lm.generate(["A", "The fox"], **asked)
    core, windows = lm._kept_pages._core, []
    start = core._device.start

    def watched(slots, pages, max_steps, nodes):
        windows.append((core.scheduler.others_come, max_steps))
        return start(slots, pages, max_steps, nodes)

    core._device.start, core._step_seconds = watched, 1e-3
    lm.generate([STORY, STORY[40:]], **asked)
    assert {steps for come, steps in windows if come} == {2}
    assert max(steps for come, steps in windows if not come) > 8


@pytest.mark.exhaustive
def test_several_samples_and_an_unread_stream(lm):
    options = {"max_new_tokens": 20, "sampling": SamplingParams(temperature=0.9, n=3, logprobs=True)}
    expected = lm.generate(STORY, **options)
    assert fields(lm.generate(STORY, reuse=True, **options)) == fields(expected)
    # One that begins, is overtaken and dropped.
    unread = lm.stream(STORY, max_new_tokens=20, reuse=True)
    next(unread)
    assert fields(lm.generate(STORY, reuse=True, **options)) == fields(expected)
    unread.close()
    assert fields(lm.generate(STORY, reuse=True, **options)) == fields(expected)
    lm._kept_pages._core.scheduler.check()
    assert lm._kept_pages._core.scheduler.held.pool.in_use == 0


@pytest.mark.slow
def test_threads_may_call_at_the_same_time(lm):
    prompts = [STORY + str(number) for number in range(4)]
    expected = [lm.generate(prompt, max_new_tokens=12, sampling=SAMPLING)[0] for prompt in prompts]
    found = [None] * len(prompts)

    def ask(at):
        found[at] = lm.generate(prompts[at], max_new_tokens=12, sampling=SAMPLING, reuse=True)[0]

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert fields(found) == fields(expected)


@pytest.mark.exhaustive
def test_what_cannot_be_kept_is_told_or_runs_as_ever(lm):
    with pytest.raises(InvalidOption, match="shorten it"):
        lm.prefix(STORY * 3)
    (searched,) = lm.generate(STORY, max_new_tokens=6, strategy="beam:width=2", reuse=True)
    assert searched.tokens == lm.generate(STORY, max_new_tokens=6, strategy="beam:width=2")[0].tokens
    assert lm._kept_pages.cached_tokens == 0
