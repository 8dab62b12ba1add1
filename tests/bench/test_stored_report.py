"""A report that a run wrote is read back whole, shown and drawn; any other file is one line of complaint."""

import dataclasses
import json
from pathlib import Path

import pytest

from jaxinfer.bench.acceptance import chart
from jaxinfer.bench.acceptance.measure import AcceptanceReport, BatchReport, StrategyReport
from jaxinfer.bench.acceptance.stored import read_report
from jaxinfer.bench.acceptance.tally import Tally
from jaxinfer.cli.commands import acceptance
from jaxinfer.cli.main import main


def make_report() -> AcceptanceReport:
    plain = Tally(2, 20, 20, 1.0, 20.0, 0, 0, (), 40.0, 1.0, 1.0)
    lookup = Tally(2, 20, 10, 2.0, 10.0, 40, 10, (0.7, 0.3), None, None, 1.25)
    strategies = (
        StrategyReport("autoregressive", 1, plain, {"again": plain, "new": plain}),
        StrategyReport(
            "prompt_lookup", 5, lookup, {"again": dataclasses.replace(lookup, tokens_per_step=3.0), "new": lookup}
        ),
    )
    batch = BatchReport(1, 2, 128, 0.02, {1: 1.0, 8: 1.5}, strategies)
    return AcceptanceReport("tiny", "cpu", 2, "float32", 2, 11, 1, 0.0, True, (batch,))


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(dataclasses.asdict(make_report())))
    return path


def show(*arguments: object) -> int:
    return main(["bench", "acceptance", *map(str, arguments)])


def test_what_was_written_is_what_is_read(stored: Path) -> None:
    assert read_report(stored) == make_report()
    assert tuple(chart.PANELS) == acceptance._PANELS


@pytest.mark.slow
def test_it_is_shown_and_drawn_the_same_each_time(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = stored.with_name("chart.svg"), stored.with_name("again.svg")
    for path in drawn:
        assert show("--from", stored, "--chart", path) == 0
    out, err = capsys.readouterr()
    assert out.count("prompt_lookup") == 2 * 3
    assert err.splitlines() == [f"chart: {path}" for path in drawn]
    first, again = (path.read_bytes() for path in drawn)
    assert first == again
    assert b"<svg" in first
    assert show("--from", stored, "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(stored.read_text())


def test_panels_choose_what_is_drawn(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles = []

    def keep_titles(figure, path: Path) -> None:
        titles.append([axes.get_title() for axes in figure.axes])
        assert figure.axes[0].get_xticklabels()[1].get_text() == "again"
        assert [bar.get_height() for bar in figure.axes[0].patches] == [2, 3, 2]

    monkeypatch.setattr(chart, "save_chart", keep_titles)
    for panels in ("tokens", "tokens,depth"):
        assert show("--from", stored, "--chart", stored.with_name("x.svg"), "--panels", panels) == 0
    assert titles == [["batch 1: tokens per step"], ["batch 1: tokens per step", "batch 1: acceptance by depth"]]


def test_many_strategies_are_tables_with_the_best_of_each_category_bold(stored: Path, monkeypatch) -> None:
    report = json.loads(stored.read_text())
    plain, lookup = report["batches"][0]["strategies"]
    others = [json.loads(json.dumps(lookup)) for _ in range(chart.MOST_BARS)]
    for number, one in enumerate(others):
        one["strategy"] = f"other{number}"
        one["overall"]["tokens_per_step"] = 2.5 + number
    report["batches"][0]["strategies"] = [plain, lookup, *others]
    stored.write_text(json.dumps(report))
    tables = []

    def keep(figure, path: Path) -> None:
        for axes in figure.axes[:2]:
            texts = {text.get_position(): (text.get_text(), text.get_weight()) for text in axes.texts}
            tables.append(([label.get_text() for label in axes.get_yticklabels()], texts))

    monkeypatch.setattr(chart, "save_chart", keep)
    assert show("--from", stored, "--chart", stored.with_name("x.svg")) == 0
    (names, tokens), (_, speed) = tables
    assert names == ["other3", "other2", "other1", "other0", "prompt_lookup"]
    assert [tokens[0, place] for place in (0, 4)] == [("5.50", "bold"), ("2.00", "normal")]
    assert [tokens[1, place] for place in (0, 4)] == [("3.00", "bold")] * 2
    assert speed[0, 0] == ("-", "normal")


def test_mistakes_are_one_line(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(stored.read_text())
    others = {
        "list.json": "[]",
        "text.json": "not JSON",
        "key.json": json.dumps({**report, "more": 1}),
        "kind.json": json.dumps({**report, "temperature": "hot"}),
        "part.json": json.dumps({**report, "batches": [{"batch": 1}]}),
        "cost.json": json.dumps({**report, "batches": [{**report["batches"][0], "costs": {"one": 1.0}}]}),
    }
    for name, content in others.items():
        (stored.with_name(name)).write_text(content)
    for arguments, named in (
        *((["--from", stored.with_name(name)], f"{name}: not a report") for name in others),
        (["--from", stored.with_name("none.json")], "No such file"),
        (["--from", stored, "--chart", "x.pdf"], "x.pdf"),
        (["--from", stored, "--chart", "x.svg", "--panels", "tokens,tokens"], "tokens,tokens"),
        (["--from", stored, "--chart", "x.svg", "--panels", "beauty"], "beauty"),
        (["--from", stored, "--panels", "tokens"], "--chart"),
        (["--from", stored, "--strategies", "jacobi"], "--strategies"),
        (["--from", stored, "--max-new-tokens", "5"], "--max-new-tokens"),
        ([], "--strategies"),
    ):
        assert show(*arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert len(err.splitlines()) == 1
        assert named in err
