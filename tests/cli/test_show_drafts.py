"""``--show-drafts`` marks exactly the tokens that drafts gave, and ``--stats`` says what a strategy gained."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

import jaxinfer
from jaxinfer.bench import plain_pace
from jaxinfer.cli import loading
from jaxinfer.cli.output.draft_marks import DraftMarks, colours_drafts
from jaxinfer.cli.output.stats_table import stats_lines
from jaxinfer.results import GenerationStats, StreamPiece
from tests.cli.conftest import Outcome

Run = Callable[..., Outcome]
PROMPT = "The quick fox found the moon again.\nThe quick fox found"
LOOKUP = ("--strategy", "prompt_lookup:num_draft_tokens=4", "--max-new-tokens", "24")


@pytest.fixture
def model(trained_model: jaxinfer.LanguageModel) -> jaxinfer.LanguageModel:
    return trained_model


@pytest.fixture
def generate(run: Run, model: jaxinfer.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(loading, "load_model", lambda options: model)
    return lambda *arguments, **options: run("generate", *arguments, **options)


def result_of(model: jaxinfer.LanguageModel) -> jaxinfer.GenerationResult:
    return model.generate(PROMPT, max_new_tokens=24, strategy=LOOKUP[1])[0]


@pytest.mark.slow
def test_a_result_tells_which_tokens_drafts_gave(model: jaxinfer.LanguageModel) -> None:
    """As many as were accepted, and never the first token or a step's last."""
    result = result_of(model)
    assert len(result.from_draft) == len(result.tokens)
    assert sum(result.from_draft) == result.stats.accepted > 2
    assert result.from_draft.count(False) >= result.stats.steps + 1 - (result.finish_reason == "stop")
    plain = model.generate(PROMPT, max_new_tokens=24)[0]
    assert plain.tokens == result.tokens
    assert not any(plain.from_draft)


@pytest.mark.slow
def test_marks_stand_around_the_tokens_that_drafts_gave(generate: Run, model: jaxinfer.LanguageModel) -> None:
    """The toy's tokens are bytes, so that text and tokens can be laid side by side."""
    result = result_of(model)
    plain, marked = generate(PROMPT, *LOOKUP), generate(PROMPT, "--show-drafts", *LOOKUP)
    assert re.sub(r"\{\+|\+\}", "", marked.out) == plain.out
    drafted = "".join(re.findall(r"\{\+(.*?)\+\}", marked.out, flags=re.DOTALL))
    characters = [model.tokenizer.decode([token]) for token in result.tokens]
    assert drafted == "".join(one for one, is_draft in zip(characters, result.from_draft) if is_draft) != ""
    assert "{+" in marked.err
    assert plain.err == ""


def test_json_lists_whether_each_token_came_from_a_draft(generate: Run, model: jaxinfer.LanguageModel) -> None:
    found = json.loads(generate(PROMPT, "--json", "--show-drafts", *LOOKUP).out)
    assert tuple(found["from_draft"]) == result_of(model).from_draft
    assert "from_draft" not in json.loads(generate(PROMPT, "--json", *LOOKUP).out)


def test_several_texts_are_marked_in_json_only(generate: Run) -> None:
    outcome = generate("-", "--show-drafts", *LOOKUP, stdin=b"one\ntwo")
    assert (outcome.code, outcome.out) == (2, "")
    assert "--json" in outcome.error_lines[0]


@pytest.mark.parametrize(
    ("is_terminal", "settings", "expected"),
    [(True, {}, True), (False, {}, False), (True, {"NO_COLOR": "1"}, False), (True, {"TERM": "dumb"}, False)],
)
def test_colours_are_for_terminals_that_want_them(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, settings: dict[str, str], expected: bool
) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    assert colours_drafts() is expected


def test_runs_of_drafts_go_through_pieces_and_colours_never_stay_on(model: jaxinfer.LanguageModel) -> None:
    pieces = [
        StreamPiece("abc", (1, 2, 3), ("a", "b", "c"), (False, True, True)),
        StreamPiece("de", (4, 5), ("d", "e"), (True, False)),
        StreamPiece("fg!", (6,), ("fg",), (True,)),
        StreamPiece("h", (7,), ("h",), (True,)),
        StreamPiece("", result=result_of(model)),
    ]
    plain, coloured = DraftMarks(False), DraftMarks(True)
    assert "".join(plain.mark(piece) for piece in pieces) == "a{+bcd+}e{+fg+}!{+h+}"
    green, reset = "\033[32m", "\033[0m"
    expected = [f"a{green}bc{reset}", f"{green}d{reset}e", f"{green}fg{reset}!", f"{green}h{reset}", ""]
    assert [coloured.mark(piece) for piece in pieces] == expected


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "is_slower"), [(1e-9, True), (1e3, False)])
def test_stats_say_so_where_plain_decoding_would_have_been_faster(
    generate: Run, monkeypatch: pytest.MonkeyPatch, seconds: float, is_slower: bool
) -> None:
    monkeypatch.setattr(plain_pace, "plain_step_seconds", lambda *arguments: seconds)
    outcome = generate(PROMPT, "--stats", *LOOKUP)
    assert "against plain decoding: " in outcome.err
    assert (
        "slower: on this device plain decoding would have been faster than prompt_lookup" in outcome.err
    ) is is_slower
    assert "plain" not in generate(PROMPT, "--stats", "--max-new-tokens", "4").err
    search = "--strategy", "beam:width=1"
    assert "plain" not in generate(PROMPT, "--stats", "--max-new-tokens", "4", *search).err


def test_stats_have_a_column_for_what_only_some_have() -> None:
    stats = GenerationStats(5, 4, 2, 2.0, 1.5, 2, 1, (1,), 0.1, 0.1, 0.0, 30.0, 0, drafted_ahead=3)
    assert any(line.split() == ["drafted", "ahead", "3"] for line in stats_lines([stats]))
    assert not any("ahead" in line for line in stats_lines([replace(stats, drafted_ahead=0)]))


def test_plain_steps_are_timed_without_compiling_or_changing_anything(model: jaxinfer.LanguageModel) -> None:
    prompt = model.tokenizer.encode(PROMPT)
    sampling = jaxinfer.SamplingParams(stop=("zzz",), n=2)
    first = plain_pace.plain_step_seconds(model, [prompt], 24, sampling)
    compilations = model.programs.compilations
    second = plain_pace.plain_step_seconds(model, [prompt], 24, sampling)
    assert model.programs.compilations == compilations
    assert first is not None
    assert second is not None
    assert 0 < second < 1
    too_long = [5] * (model.max_len - 4)
    assert plain_pace.plain_step_seconds(model, [too_long], 24, sampling) is None


@pytest.mark.slow
def test_the_speed_up_is_of_the_steps_that_the_longest_text_needs(model: jaxinfer.LanguageModel) -> None:
    batch = model.generate([PROMPT, "A small"], max_new_tokens=24, strategy=LOOKUP[1])
    longest = max(result.stats.new_tokens for result in batch)
    seconds = batch[0].stats.decode_seconds
    assert plain_pace.speed_up([batch, batch], 0.5) == pytest.approx((longest - 1) * 0.5 / seconds)
    assert plain_pace.speed_up([], 0.5) is None
