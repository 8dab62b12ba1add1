"""`generate` gives a row that ends to the next prompt, and every result is that of its prompt alone, in its order."""

import pytest

import jaxinfer
from jaxinfer import SamplingParams
from jaxinfer.engine.beam_device import BeamDevice
from jaxinfer.engine.device import Device
from jaxinfer.errors import EngineError

PROMPTS = ["The old", "A small otter", "One grey", "The quick", "It was", "A", "The old man"]
SAMPLED = [
    SamplingParams(logprobs=True),
    SamplingParams(temperature=1.3, top_p=0.5, seed=3, logprobs=True),
    SamplingParams(temperature=0.9, seed=1, n=3),
    SamplingParams(stop=("e",)),
    SamplingParams(ignore_eos=True, logprobs=True),
    SamplingParams(temperature=0.7, n=2, seed=8, logprobs=True),
    SamplingParams(),
]
SAME = ("prompt", "text", "tokens", "logprobs", "finish_reason", "sample")


@pytest.fixture(scope="module")
def lm(trained_folder):
    lm = jaxinfer.load(trained_folder, max_len=200)
    if not lm.programs.decoder.backend.keeps_bits:
        # Rows are refilled only where that changes no bit.
        assert not lm.refills(7, 3)
        pytest.skip("no kernels of our own for this processor")
    return lm


@pytest.fixture
def windows(monkeypatch):
    """The number of rows of each window that runs."""
    sizes: list[int] = []
    for kind in (Device, BeamDevice):

        def watched(device, slots, *rest, start=kind.start, **options):
            sizes.append(len(slots))
            return start(device, slots, *rest, **options)

        monkeypatch.setattr(kind, "start", watched)
    return sizes


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("prompt_lookup", marks=pytest.mark.slow),
        pytest.param("autoregressive", marks=pytest.mark.exhaustive),
    ],
)
def test_results_are_those_of_each_prompt_alone(lm, windows, strategy):
    found = lm.generate(PROMPTS, max_new_tokens=30, sampling=SAMPLED, strategy=strategy, batch_size=3)
    # Three rows are busy nearly always, though no three texts end together.
    assert max(windows) == 3
    assert sum(size == 3 for size in windows) > len(windows) / 2
    del windows[:]
    expected = [
        result
        for prompt, sampling in zip(PROMPTS, SAMPLED)
        for result in lm.generate(prompt, max_new_tokens=30, sampling=sampling)
    ]
    assert windows == []
    assert [[getattr(one, name) for name in SAME] for one in found] == [
        [getattr(one, name) for name in SAME] for one in expected
    ]
    assert [one.stats.new_tokens for one in found] == [one.stats.new_tokens for one in expected]
    assert all(one.stats.decode_seconds > 0 for one in found if len(one.tokens) > 10)


@pytest.mark.exhaustive
def test_beam_searches_make_room_for_the_next_prompt(lm, windows):
    """Two at a time; what each finds is what it finds in a batch, and all results of a prompt come together."""
    sampling = [SamplingParams(n=number, logprobs=True) for number in (2, 1, 2, 1, 2)]
    options = {"max_new_tokens": 30, "strategy": "beam:width=2,length_penalty=0.5", "sampling": sampling}
    found = list(lm.generate_batches(PROMPTS[:5], batch_size=5, **options))
    assert max(windows) == 2
    assert len(found) > 2
    del windows[:]
    together = list(lm.generate_batches(PROMPTS[:5], batch_size=10, **options))
    assert windows == []
    texts, expected = (
        [[getattr(one, name) for name in SAME] for rows in each for one in rows] for each in (found, together)
    )
    assert texts == expected
    stats, expected_stats = ([one.stats for rows in each for one in rows] for each in (found, together))
    assert [(one.steps, one.tokens_per_step) for one in stats] == [
        (one.steps, one.tokens_per_step) for one in expected_stats
    ]
    assert all(one.decode_seconds > 0 for one in stats)


@pytest.mark.slow
def test_results_come_while_others_run(lm, windows):
    lengths = [SamplingParams(ignore_eos=True)] * len(PROMPTS)
    batches = lm.generate_batches(PROMPTS, max_new_tokens=20, sampling=lengths, batch_size=2)
    first, before = next(batches), len(windows)
    assert [one.prompt for one in first] == PROMPTS[: len(first)]
    assert len(first) < len(PROMPTS)
    rest = [one for batch in batches for one in batch]
    assert [one.prompt for one in (*first, *rest)] == PROMPTS
    assert len(windows) > before


@pytest.mark.slow
def test_what_is_dropped_half_way_leaves_no_trace(lm):
    batches = lm.generate_batches(PROMPTS, max_new_tokens=20, batch_size=2)
    next(batches)
    batches.close()
    assert len(lm.generate(PROMPTS, max_new_tokens=4, batch_size=2)) == len(PROMPTS)


@pytest.mark.slow
def test_a_second_call_compiles_nothing_that_it_waits_for(lm):
    options = {"max_new_tokens": 10, "sampling": SamplingParams(ignore_eos=True), "batch_size": 3}
    lm.generate(PROMPTS, **options)
    before = lm._paged_programs.compile_seconds
    lm.generate(PROMPTS[::-1], **options)
    assert lm._paged_programs.compile_seconds == before


def test_a_device_that_fails_is_told(lm, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Device, "start", fails)
    with pytest.raises(EngineError, match="out of memory"):
        lm.generate(PROMPTS, max_new_tokens=10, sampling=SamplingParams(ignore_eos=True), batch_size=3)


@pytest.mark.parametrize(
    "options", [{"batch_size": 1}, {"batch_size": 7}, {"strategy": "beam:width=2", "batch_size": 3}]
)
def test_what_needs_no_other_prompt_runs_as_batches(lm, windows, options):
    assert len(lm.generate(PROMPTS, max_new_tokens=3, **options)) >= len(PROMPTS)
    assert windows == []
