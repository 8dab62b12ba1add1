"""The acceptance benchmark counts, times and predicts what strategies did, and shows what is done when cut short."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.bench.acceptance import measure as acceptance
from jaxinfer.bench.acceptance.measure import AcceptanceRun, Sample, pick, usable_strategies
from jaxinfer.bench.acceptance.tally import Group, Tally, add_up
from jaxinfer.cli import loading
from jaxinfer.cli.commands.acceptance import split_strategies
from jaxinfer.cli.main import main
from jaxinfer.decoding.strategies.auto import Auto
from jaxinfer.decoding.strategies.cascade import Cascade
from jaxinfer.decoding.strategies.draft_model import DraftModel
from jaxinfer.decoding.strategies.prompt_lookup import PromptLookup
from jaxinfer.language_model import LanguageModel
from jaxinfer.planning.cost_model import StepCosts, drafter_seconds, measure_step_costs, step_seconds
from jaxinfer.results import GenerationResult, GenerationStats

LOOKUP = "prompt_lookup:num_draft_tokens=4"
ENTRIES = [
    {"prompt": "The quick fox found the moon again.\nThe quick", "category": "again"},
    {"prompt": "One grey", "category": "new"},
    {"prompt": "A small otter watched the river.\nA small otter", "category": "again"},
]
COSTS = StepCosts(1, 128, {1: 2.0, 4: 5.0, 8: 6.0})


@pytest.fixture
def model(trained_model: LanguageModel) -> LanguageModel:
    return trained_model


@pytest.fixture
def bench(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run the command on three prompts of two categories, with the costs of steps given."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(loading, "load_model", lambda options: model)
    monkeypatch.setattr(acceptance, "measure_step_costs", lambda *arguments: COSTS)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, ENTRIES)))

    def run(*arguments: str) -> tuple[int, str, str]:
        common = ("--prompts", str(prompts), "--max-new-tokens", "20", "--repeats", "2")
        code = main(["bench", "acceptance", *common, *arguments])
        return code, *capsys.readouterr()

    return run


def stats(new_tokens: int, steps: int, passes: float, drafted: int, by_depth: tuple[int, ...]) -> GenerationStats:
    counts = {"new_tokens": new_tokens, "steps": steps, "target_passes": passes, "drafted": drafted}
    times = dict.fromkeys(("prefill_seconds", "decode_seconds", "compile_seconds", "tokens_per_second"), 0.0)
    return GenerationStats(
        prompt_tokens=3,
        tokens_per_step=0.0,
        accepted=sum(by_depth),
        accepted_by_depth=by_depth,
        seed=0,
        **counts,
        **times,
    )


def tally(groups: list[Group], category: str | None = None) -> Tally:
    return add_up(groups, category, "lookup", "autoregressive", PromptLookup(num_draft_tokens=3), COSTS, 0.0)


def group(categories: tuple[str, ...], *rows: GenerationStats, seconds: float, plain: float) -> Group:
    """Make a group whose baseline took a step for each token but the first."""
    baseline = tuple(stats(row.new_tokens, row.new_tokens - 1, row.new_tokens - 1.0, 0, ()) for row in rows)
    return Group(
        len(rows),
        categories,
        {"lookup": rows, "autoregressive": baseline},
        {"lookup": seconds, "autoregressive": plain},
    )


def test_sums_are_those_made_by_hand() -> None:
    """Two prompts alone: 20 tokens in 10 steps of 4 nodes, of which drafting read half a model each."""
    groups = [
        group(("a",), stats(13, 6, 9.0, 18, (4, 2)), seconds=3.0, plain=6.0),
        group(("b",), stats(9, 4, 6.0, 12, (3, 1)), seconds=1.0, plain=4.0),
    ]
    found = tally(groups)
    assert (found.prompts, found.tokens, found.steps, found.tokens_per_step) == (2, 20, 10, 2.0)
    assert (found.target_passes, found.drafted, found.accepted) == (15.0, 30, 10)
    assert found.acceptance_by_depth == pytest.approx((0.7, 0.3))
    assert found.tokens_per_second == pytest.approx(20 / 4)
    assert found.speed_up == pytest.approx(10 / 4)
    # Ten steps of 5.0 and half of 2.0 against twenty steps of 2.0.
    assert found.predicted_speed_up == pytest.approx(40 / (10 * 6.0))
    assert tally(groups, "b").speed_up == pytest.approx(4.0)
    assert tally(groups, "a").tokens_per_step == pytest.approx(2.0)


def test_a_batch_takes_as_long_as_its_slowest_row_and_has_no_times_for_a_part() -> None:
    """The third row only fills the batch up: it is not a prompt, but the batch waits for it."""
    rows = (stats(13, 6, 6.0, 18, (6,)), stats(5, 4, 4.0, 12, (0,)), stats(17, 8, 8.0, 24, (8,)))
    groups = [group(("a", "b"), *rows, seconds=4.0, plain=8.0)]
    found = tally(groups)
    assert (found.prompts, found.tokens, found.steps) == (2, 16, 10)
    assert found.speed_up == pytest.approx(2.0)
    assert found.predicted_speed_up == pytest.approx(16 * 2.0 / (8 * 5.0))
    part = tally(groups, "b")
    assert (part.prompts, part.tokens_per_step) == (1, 1.0)
    assert (part.speed_up, part.predicted_speed_up, part.tokens_per_second) == (None, None, None)
    assert tally([]).speed_up is None


def test_costs_between_the_measured_ones_are_on_the_line() -> None:
    assert [COSTS.of(nodes) for nodes in (1, 2, 4, 6, 8, 12)] == pytest.approx([2.0, 3.0, 5.0, 5.5, 6.0, 7.0])
    assert COSTS.relative == pytest.approx({1: 1.0, 4: 2.5, 8: 3.0})
    assert StepCosts(1, 128, {1: 2.0}).of(9) == 2.0
    lookup = PromptLookup(num_draft_tokens=3)
    assert step_seconds(COSTS, lookup, 1.0, 3.0, 0.0) == 5.0
    assert step_seconds(COSTS, lookup, 1.5, 3.0, 0.25) == 5.0 + 1.0 + 0.75


@pytest.mark.slow
def test_steps_and_drafters_are_measured_on_this_device(model: LanguageModel) -> None:
    costs = measure_step_costs(model.programs.decoder, model.params, 2, 64, (3,))
    assert sorted(costs.seconds) == [1, 3]
    assert min(costs.seconds.values()) > 0
    at_hand = {"config": model.config, "backend": model.backend, "params": model.params}
    for drafter in (DraftModel(model="x", **at_hand), Cascade(drafter=PromptLookup(num_draft_tokens=2), **at_hand)):
        assert drafter_seconds(drafter, 1, 64) > 0
    # What takes turns with a cascade is foretold as that, and not as if its own nodes gave as many tokens.
    turns = Auto(nodes=4, cascade=Cascade(num_draft_tokens=7, drafter=PromptLookup(num_draft_tokens=2), **at_hand))
    assert drafter_seconds(turns, 1, 64) > 0
    assert step_seconds(StepCosts(1, 64, {1: 2.0, 4: 3.0, 8: 9.0}), turns, 1.0, 7.0, 0.5) == 9.0 + 3.5
    assert drafter_seconds(PromptLookup(), 1, 64) == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["prompt_lookup,jacobi"], ["prompt_lookup", "jacobi"]),
        (
            ["lookahead:window=5,ngram=3,jacobi", "autoregressive"],
            ["lookahead:window=5,ngram=3", "jacobi", "autoregressive"],
        ),
        (["medusa:heads=x,tree=chain:4,jacobi"], ["medusa:heads=x,tree=chain:4", "jacobi"]),
        (["jacobi,medusa+prompt_lookup+nodes=8"], ["jacobi", "medusa+prompt_lookup+nodes=8"]),
        (["jacobi", "medusa:heads=x", "jacobi,"], ["jacobi", "medusa:heads=x"]),
    ],
)
def test_options_stay_with_their_strategy(words: list[str], expected: list[str]) -> None:
    assert split_strategies(words) == expected


def test_all_strategies_are_those_that_the_model_has_what_they_need_for(model: LanguageModel) -> None:
    usable, refused = usable_strategies(model)
    assert {"auto", "prompt_lookup", "suffix", "jacobi", "lookahead", "layerskip"} <= set(usable)
    assert {"draft_model", "eagle", "medusa"} <= refused.keys()
    assert "name the draft model" in refused["draft_model"]
    assert not {"autoregressive", "beam", "mcts"} & {*usable, *refused}


def test_so_many_of_each_category_are_picked() -> None:
    samples = [Sample((at,), "ab"[at % 2]) for at in range(6)]
    assert [sample.tokens[0] for sample in pick(samples, 2)] == [0, 1, 2, 3]
    assert pick(samples, None) == samples


@pytest.mark.exhaustive
def test_json_is_one_object_that_agrees_with_the_library_and_a_chart_is_drawn(
    bench: Any, model: LanguageModel, tmp_path: Path
) -> None:
    chart = tmp_path / "chart.png"
    code, out, err = bench("--strategies", LOOKUP, "--batch", "1,2", "--json", "--chart", str(chart))
    report = json.loads(out)
    assert code == 0
    assert err == f"chart: {chart}\n"
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert (report["complete"], report["prompts"], [one["groups"] for one in report["batches"]]) == (True, 3, [3, 2])
    prompts = [entry["prompt"] for entry in ENTRIES]
    expected = [model.generate(one, max_new_tokens=20, strategy=LOOKUP)[0].stats for one in prompts]
    for batch in report["batches"]:
        plain, lookup = batch["strategies"]
        assert (plain["strategy"], lookup["strategy"], lookup["nodes"]) == ("autoregressive", LOOKUP, 5)
        assert plain["overall"]["speed_up"] == plain["overall"]["predicted_speed_up"] == 1
        assert plain["overall"]["tokens_per_step"] == 1
        found = lookup["overall"]
        assert found["steps"] == sum(one.steps for one in expected)
        assert found["accepted"] == sum(one.accepted for one in expected) > 0
        assert found["speed_up"] > 0
        assert {name: one["prompts"] for name, one in lookup["categories"].items()} == {"again": 2, "new": 1}
    alone, together = (batch["strategies"][1]["categories"]["new"]["speed_up"] for batch in report["batches"])
    assert alone > 0
    assert together is None


@pytest.mark.slow
def test_an_interrupt_shows_what_is_done(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run_group = AcceptanceRun._run_group

    def interrupted(self: AcceptanceRun, *arguments: Any) -> Group:
        if self.groups:
            raise KeyboardInterrupt
        return run_group(self, *arguments)

    monkeypatch.setattr(AcceptanceRun, "_run_group", interrupted)
    code, out, _ = bench("--strategies", LOOKUP, "--batch", "1", "--per-category", "1")
    assert code == 130
    assert "stopped early" in out
    (line,) = (line for line in out.splitlines() if line.startswith(LOOKUP))
    assert line.split()[1:4] == ["all", "1", "5"]


def test_mistakes_are_one_line(bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (made_folder := tmp_path / "folder.png").mkdir()
    for arguments, named in (
        (["--strategies", "magic"], "magic"),
        (["--strategies", ","], "names none"),
        (["--strategies", "beam"], "beam"),
        (["--strategies", "mcts"], "mcts"),
        (["--strategies", LOOKUP, "--batch", "0"], "--batch"),
        (["--strategies", LOOKUP, "--batch", "2,2"], "2,2"),
        (["--strategies", LOOKUP, "--max-new-tokens", "1020"], "1024"),
        (["--strategies", LOOKUP, "--chart", "x.pdf"], "x.pdf"),
        (["--strategies", LOOKUP, "--chart", str(made_folder)], "cannot be written"),
        (["--strategies", LOOKUP, "--chart", str(tmp_path / "none" / "x.png")], "none"),
    ):
        code, out, err = bench(*arguments)
        assert (code, out) == (2, "")
        assert len(err.splitlines()) == 1
        assert err.startswith("error: ")
        assert named in err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    _, _, err = bench("--strategies", LOOKUP, "--chart", str(tmp_path / "x.png"))
    assert "jaxinfer[bench]" in err


def test_a_measurement_that_was_cut_short_goes_on(bench, tmp_path, monkeypatch):
    """Only what is missing is measured, and what was being written at the end; other files are refused."""
    kept, runs = tmp_path / "kept.jsonl", []
    asked = ("--strategies", LOOKUP, "--batch", "1", "--json", "--resume")

    def generated(lm, prompts, *, strategy, **options):
        runs.append(strategy.name)
        (prompt,) = prompts
        return [GenerationResult(None, "", (), (), "length", stats(20, 8 + len(prompt) % 3, 8.0, 12, (5, 2)))]

    monkeypatch.setattr(LanguageModel, "generate", generated)
    first = json.loads(bench(*asked, str(kept))[1])
    lines = kept.read_text().splitlines(keepends=True)
    assert (len(lines), len(runs)) == (3, 3 * 2 * 2)
    assert json.loads(bench(*asked, str(kept))[1]) == first
    assert len(runs) == 12
    kept.write_text("".join(lines[:2]) + lines[2][:50])
    assert json.loads(bench(*asked, str(kept))[1]) == first
    assert len(runs) == 12 + 2 * 2
    assert kept.read_text().splitlines(keepends=True)[3:] == lines[2:]
    assert json.loads(bench(*asked, str(kept))[1]) == first
    bench("--strategies", "prompt_lookup", *asked[2:], str(kept))
    assert len(runs) == 16 + 12
    kept.write_text("# notes\n" * 3)
    for file, mend in ((kept, "line 1 is no group"), (tmp_path / "nowhere" / "kept.jsonl", "there is no folder")):
        code, _, error = bench(*asked, str(file))
        assert (code, mend in error) == (2, True)
