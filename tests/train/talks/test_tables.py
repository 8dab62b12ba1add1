"""Tables of talks follow from what commands measure: each is asked for once, as it would be by hand, and drawn."""

import argparse
import dataclasses
import json
import re
from pathlib import Path

import pytest

from jaxinfer.bench.acceptance.measure import AcceptanceReport, BatchReport, StrategyReport
from jaxinfer.bench.acceptance.tally import Tally
from jaxinfer.checkpoint.drafters.shipped import DRAFTERS
from jaxinfer.cli.commands import acceptance as acceptance_command
from tests.test_docs import options as options_of
from train import recipe
from train.command import run_command
from train.talks import __main__ as talks
from train.talks.break_even import Point, break_even
from train.talks.streams import medusa_parameters, num_parameters, stream_parameters

SQL = {"text": "table: 1\ncolumns: A, B\nQ: What is A\nA: SELECT A FROM 1"}
E2E = "mr,ref\n" + "".join(f'"name[{n}], area[x]",{n} is at x.\n' for n in range(40))


def make(*words):
    return run_command("talks", "", talks.add_arguments, talks.run, list(map(str, words)))


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    for name in ("tasks/wikisql", "prompts"):
        (folder / name).mkdir(parents=True)
    for split in ("train", "test"):
        (folder / "tasks" / "wikisql" / f"{split}.jsonl").write_text(f"{json.dumps(SQL)}\n" * 20)
    (folder / "tasks" / "e2e_dev.csv").write_text(E2E)
    articles = [{"category": kind, "turns": [f"Summarize: {kind}"]} for kind in ("writing", "summarization") * 3]
    (folder / "prompts" / "spec_bench.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in articles))
    return folder


# Tokens a step and seconds a step of each strategy, over a plain step.
PACES = {"autoregressive": (1, 1), "medusa": (2.0, 1.25), "streams": (1.5, 1.2), "draft_model": (3.0, 2.4)}


def acceptance(options):
    """Return a report of 12 tokens a prompt, 0.01 seconds a plain step."""
    specs = ["autoregressive", *options.strategies]
    tasks = [json.loads(line)["category"] for line in Path(options.prompts).read_text().splitlines()]
    prompts = len(tasks)
    nodes = {count: 1 + (count - 1) / 10 for count in (1, *options.nodes)}

    def tally(spec, prompts):
        pace, cost = PACES[spec.partition(":")[0]]
        steps = 12 * prompts / pace
        drafts = int(re.search(r"num_draft_tokens=(\d+)", spec)[1]) if "num_draft" in spec else 3
        rate = pace / (0.01 * cost)
        counts = (prompts, 12 * prompts, round(steps), pace, steps, round(steps) * drafts, 0)
        return Tally(*counts, (), rate, pace / cost, None)

    def by_task(spec):
        return {task: tally(spec, tasks.count(task)) for task in tasks} if len(set(tasks)) > 1 else {}

    strategies = tuple(StrategyReport(spec, 1, tally(spec, prompts), by_task(spec)) for spec in specs)
    batch = BatchReport(1, prompts, 64, 0.01, nodes, strategies)
    device = ("toy", "cpu", 2, "float32")
    return AcceptanceReport(*device, prompts, options.max_new_tokens, options.repeats, 0.0, True, (batch,))


@pytest.fixture
def told(monkeypatch):
    """Return the commands that a table runs; each is parsed as it would be, and leaves what it would."""
    calls = []

    def call(command, *words, to=None):
        words = list(map(str, words))
        named = ["jaxinfer", *words] if command == "jaxinfer" else ["python", "-m", command, *words]
        known = options_of(named)
        assert all(word in known for word in words if word.startswith("--")), words
        calls.append((command, words))
        if words[:2] == ["bench", "acceptance"]:
            to.write_text(json.dumps(dataclasses.asdict(acceptance(parse(words)))))
        elif words[:2] == ["bench", "throughput"]:
            loads = [
                {"kind": kind, "size": size, "spread": spread, "tokens_per_second": speed * size * (1 + spread)}
                for size in (2.0, 4.0)
                for spread in (0.0, 1.0)
                for kind, speed in (("static", 3.0 / (1 + spread)), ("clients", 4.5))
            ]
            about = {"model": "toy", "dtype": "float32", "max_new_tokens": 8, "repeats": 1}
            to.write_text(json.dumps({**about, "loads": loads}))
        elif words[:2] == ["bench", "quality"]:
            width = int(re.search(r"width_(\d+)", words[words.index("--model") + 1])[1])
            weights, others = 25 * width**2, 1000 * width
            forms = [{"weights": "as they are", "num_bytes": others + 4 * weights, "perplexity": 320 / width}]
            for bits in (2, 4):
                size = others + weights * (bits + 1) // 8
                grown = {2: 8, 4: 1.25}[bits] * 320 / width
                forms.append({"weights": f"{bits} bits:group=32", "num_bytes": size, "perplexity": grown})
            to.write_text(json.dumps({"results": forms}))
        elif words[:1] == ["plan"]:
            to.write_text('{"speculation": {"cost": 1.5}}')
        elif command == "train.quality":
            to.write_text('{"overall": {"exact": 0.5, "rouge1": 0.25, "rougeLsum": 0.125}}')
        elif command == "train.data":
            Path(words[words.index("--out") + 1]).write_text("{}\n")
        else:
            part = {
                "train.distill": "draft",
                "train.medusa": "heads",
                "train.streams": "streams",
                "train.layerskip": "model",
            }[command]
            folder = Path(words[words.index("--out") + 1]) / part
            folder.mkdir(parents=True)
            (folder / "streams.json").write_text('{"model_dim": 8, "vocab_size": 64}')

    monkeypatch.setattr(recipe, "call", call)
    return calls


def parse(words):
    acceptance_command.add_arguments(parser := argparse.ArgumentParser())
    return parser.parse_args(words[2:])


def test_the_talks_formulas_give_its_figures():
    """Of OPT-1.3B, Phi-1.3B and OpenLlama-7B, as the first table of 2402.11131 prints them."""
    for vocab_size, width, medusa, streams in (
        (50272, 2048, 4.28e8, 4.096e4),
        (51200, 2048, 4.36e8, 4.096e4),
        (32000, 4096, 5.91e8, 8.19e4),
    ):
        assert medusa_parameters(vocab_size, width) == pytest.approx(medusa, rel=2e-3)
        assert stream_parameters(width) == pytest.approx(streams, rel=1e-3)


def test_on_the_line_neither_is_faster_and_above_it_the_draft_model_is():
    gamma, draft, target, stream = 4, 0.3, 1.1, 1.4
    zeta = 1.5 * break_even(gamma, draft / target, stream / target)
    at = Point("sql", "small", gamma, draft, target, stream, zeta, beta=1.5)
    assert at.advantage == pytest.approx(1)
    assert dataclasses.replace(at, zeta=1.1 * zeta).advantage == pytest.approx(1 / 1.1)
    assert break_even(0, 0.5, 2) == 0.5


def test_two_models_are_counted_and_priced_and_their_points_lie_on_the_equation(data, told, tmp_path, capsys):
    """A step of the draft model takes 24 ms, 14 of them a verification of five nodes; one of streams 12."""
    same = ("--work", tmp_path / "work", "--out", tmp_path / "out")
    asked = ("two-models", *same, "--data", data, "--prompts", 2, "--tasks", "sql", "e2e", "--texts", 8)
    assert make(*asked) == 0
    table = json.loads((tmp_path / "out" / "two-models.json").read_text())
    plain, streams, few_bits, small = table["tasks"][0]["rows"]
    assert [row["kind"] for row in (plain, streams, few_bits, small)] == ["plain", "streams", *["draft model"] * 2]
    assert (plain["target_calls"], plain["draft_calls"], plain["ms"]) == pytest.approx((12, 0, 120))
    assert (streams["draft_calls"], streams["ms"]) == pytest.approx((0, 96))
    assert (few_bits["target_calls"], few_bits["draft_calls"]) == pytest.approx((4, 16))
    assert small["ms"] == pytest.approx(96)
    assert small["strategy"].endswith("/draft,num_draft_tokens=4")
    # What is measured and trained stays: nothing runs again, and with other options only what they change.
    count = len(told)
    assert [command for command, _ in told].count("train.distill") == 1
    assert make(*asked) == 0
    assert len(told) == count
    assert make(*asked, "--max-new-tokens", 32) == 0
    assert [words[:2] for _, words in told[count:]] == [["bench", "acceptance"]]
    assert make("break-even", *same, "--drafts", 4) == 0
    even = json.loads((tmp_path / "out" / "break-even.json").read_text())
    assert {point["task"] for point in even["points"]} == {"sql", "e2e"}
    (point,) = [one for one in even["points"] if one["task"] == "sql" and "layers" in one["drafter"]]
    assert (point["gamma"], point["zeta"], point["beta"]) == pytest.approx((4, 3.0, 1.5))
    assert point["latency_ratio"] == pytest.approx((24 - 14) / 4 / 14)
    assert point["advantage"] == pytest.approx(small["ms"] / streams["ms"], rel=1e-9)
    for name in ("two-models", "break-even"):
        assert "</svg>" in (tmp_path / "out" / f"{name}.svg").read_text()
    assert "itself in 4 bits" in capsys.readouterr().out


def test_streams_stand_beside_medusa_with_marks_parameters_and_an_ablation(data, told, tmp_path):
    folders = {kind: tmp_path / kind for kind in ("heads", "streams")}
    for folder in folders.values():
        folder.mkdir()
    (folders["streams"] / "streams.json").write_text('{"model_dim": 8, "vocab_size": 64}')
    named = ("--medusa", f"medusa:heads={folders['heads']}", "--streams", f"streams:heads={folders['streams']}")
    same = ("--work", tmp_path / "work", "--data", data, "--prompts", 2, "--texts", 8)
    assert make("streams", *same, *named, "--layers", 1, 2) == 0
    table = json.loads((tmp_path / "work" / "streams.json").read_text())
    sql, summaries, _ = table["tasks"]
    assert [row["call_reduction"] for row in sql["rows"]] == [1, 2.0, 1.5]
    assert sql["marks"] == {"exact": 0.5, "rouge1": 0.25, "rougeLsum": 0.125}
    assert summaries["marks"] is None
    assert table["parameters"]["streams"]["formula"] == 160
    assert [row["name"] for row in table["ablation"]["rows"]] == ["Medusa", "streams, 1", "streams, 2"]
    trained = [words for command, words in told if command == "train.streams"]
    assert [words[words.index("--layers") + 1] for words in trained] == ["1", "2"]
    assert (
        len(
            {
                words[words.index("--data") + 1]
                for command, words in told
                if command in ("train.streams", "train.medusa")
            }
        )
        == 1
    )


def test_the_size_of_trees_is_drawn_here_and_on_a_chip(data, told, tmp_path):
    same = ("--work", tmp_path / "work", "--data", data, "--prompts", 2, "--tasks", "sql")
    assert make("tree-size", *same, "--k", 1, 3, "--keep", 5) == 0
    table = json.loads((tmp_path / "work" / "tree-size.json").read_text())
    assert [(row["k"], row["keep"], row["nodes"]) for row in table["rows"]] == [(1, 0, 4), (3, 0, 40), (3, 5, 40)]
    assert [row["speed_up"] for row in table["rows"]] == pytest.approx([1.25] * 3)
    assert [row["tpu_speed_up"] for row in table["rows"]] == [1.0] * 3
    planned = [words[words.index("--strategy") + 1] for _, words in told if words[0] == "plan"]
    assert planned == ["streams:tree=1.1.1", "streams:tree=3.3.3", "streams:tree=3.3.3,keep_nodes=5"]


def test_batching_is_compared_at_each_batch_and_spread(data, told, tmp_path):
    same = ("--work", tmp_path / "work", "--data", data, "--at-once", 2, 4, "--spread", 0, 1)
    assert make("static-continuous", *same) == 0
    found = json.loads((tmp_path / "work" / "static-continuous.json").read_text())["rows"]
    assert [(row["at_once"], row["spread"]) for row in found] == [(2, 0), (2, 1), (4, 0), (4, 1)]
    assert [row["ratio"] for row in found] == pytest.approx([1.5, 3.0] * 2)


def test_models_of_a_family_are_compared_at_equal_bits_of_their_matrices(data, told, tmp_path):
    """A model of width 64 in 4 bits (and one for scales) takes less than one of 32 in floats, and is better."""
    like = tmp_path / "like"
    like.mkdir()
    (like / "config.json").write_text('{"vocab_size": 258, "hidden_size": 8}')
    (like / "tokenizer.json").write_text("{}")
    text = tmp_path / "text.txt"
    text.write_text("a line of text\n" * 50)
    same = ("--work", tmp_path / "work", "--like", like, "--text", text)
    assert make("bits", *same, "--widths", 32, 64, "--bits", 2, 4) == 0
    table = json.loads((tmp_path / "work" / "bits.json").read_text())
    weights = {32: 25 * 32**2, 64: 25 * 64**2}
    found = {(row["width"], row["bits"]): row for row in table["rows"]}
    assert {of: row["total_bits"] for of, row in found.items()} == {
        (width, bits): weights[width] * bits for width in weights for bits in (3, 5, 32)
    }
    least, *_, most = table["budgets"]
    assert (most["width"], most["bits"]) == (64, 32)
    assert least["perplexity"] == 12.5 == found[32, 5]["perplexity"]
    begun = json.loads((tmp_path / "work" / "begun_64_3" / "config.json").read_text())
    assert (begun["hidden_size"], begun["num_attention_heads"], begun["vocab_size"]) == (64, 4, 258)
    learned, judged = ((tmp_path / "work" / name).read_text() for name in ("learned.txt", "judged.txt"))
    assert learned + judged == text.read_text()
    assert make("bits", *same, "--widths", 40) == 2


def test_parameters_are_those_on_disk_without_scales():
    assert num_parameters(DRAFTERS / "smollm2-135m-instruct" / "streams") == 323_520


def test_mistakes_end_in_one_line(data, told, tmp_path, capsys):
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "two-models.json").write_text('{"tasks": [{"rows": []}]}')
    cases = {
        "add --data FOLDER": ("two-models", "--work", tmp_path / "work"),
        "no such folder": ("two-models", "--work", tmp_path / "work", "--data", tmp_path / "absent"),
        "make that table again": ("break-even", "--work", bad),
        "invalid choice": ("break-evens",),
    }
    for complaint, words in cases.items():
        assert make(*words) == 2, complaint
        errors = capsys.readouterr().err
        assert complaint in errors
        assert errors.count("\n") == 1
    assert not told
