"""The throughput benchmark serves every prompt under each load, and reports what it took."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import jaxinfer
from jaxinfer import SamplingParams
from jaxinfer.bench.throughput.chart import draw_throughput
from jaxinfer.bench.throughput.lengths import draw_lengths, run_static
from jaxinfer.bench.throughput.measure import (
    Load,
    ThroughputReport,
    Workload,
    _by_clients,
    measure_throughput,
    num_runs,
)
from jaxinfer.bench.throughput.table import throughput_lines
from jaxinfer.cli.main import main
from jaxinfer.engine.engine import Engine
from jaxinfer.errors import EngineBusy, InvalidOption
from tests.engine.test_engine import OPTIONS, PROMPTS
from tests.toys import encode_bytes

WORK = Workload("autoregressive", (2,), (50.0,), 12, 1, SamplingParams(ignore_eos=True))


@pytest.mark.exhaustive
def test_every_load_serves_every_prompt(trained_folder, monkeypatch):
    lm, done, salts = jaxinfer.load(trained_folder, max_len=200), [], []
    submit = Engine.submit

    def recorded(engine, prompt, **options):
        salts.append(options["cache_salt"])
        return submit(engine, prompt, **options)

    monkeypatch.setattr(Engine, "submit", recorded)
    prompts = [encode_bytes(prompt) for prompt in PROMPTS]
    report = measure_throughput("toy", lm, prompts, WORK, OPTIONS, done.append)
    assert len(done) == num_runs(WORK) == 7
    assert [(load.kind, load.size) for load in report.loads] == [("static", 2), ("clients", 2), ("arrivals", 50)]
    for load in report.loads:
        assert (load.requests, load.output_tokens) == (len(PROMPTS), 12 * len(PROMPTS))
        assert load.tokens_per_second == pytest.approx(load.output_tokens / load.seconds)
        times = load.first_token_p50, load.first_token_p99, load.token_p50, load.token_p99
        if load.kind == "static":
            assert times == (None,) * 4
        else:
            assert 0 < times[0] <= times[1] <= load.seconds
            assert 0 < times[2] <= times[3]
    assert not lm._has_engine
    # Two loads of an engine run twice each, and none finds the prompts of another in the cache.
    assert sorted(Counter(salts).values()) == [len(PROMPTS)] * 4


@pytest.mark.slow
def test_an_engine_is_compared_with_itself_without_drafts(trained_folder, monkeypatch):
    lm, drafts = jaxinfer.load(trained_folder, max_len=200), []
    submit = Engine.submit

    def recorded(engine, prompt, **options):
        drafts.append(options["drafts"])
        return submit(engine, prompt, **options)

    monkeypatch.setattr(Engine, "submit", recorded)
    work = replace(WORK, strategy="prompt_lookup", against="undrafted", rates=())
    report = measure_throughput("toy", lm, [encode_bytes(prompt) for prompt in PROMPTS], work, OPTIONS)
    assert [(load.kind, load.output_tokens) for load in report.loads] == [
        (kind, 12 * len(PROMPTS)) for kind in ("undrafted", "clients")
    ]
    assert drafts == 2 * ([False] * len(PROMPTS) + [True] * len(PROMPTS))
    lines = throughput_lines(report)
    assert lines[-2].startswith("2 at once, no drafts")
    ratio = report.loads[1].tokens_per_second / report.loads[0].tokens_per_second
    assert f" {ratio:.2f}x " in lines[-1]


def test_a_prompt_without_room_is_refused_before_anything_runs(trained_folder):
    lm = jaxinfer.load(trained_folder, max_len=20)
    prompts = [encode_bytes("a" * length) for length in (19, 20)]
    with pytest.raises(InvalidOption, match=r"^prompt 2 has 20 tokens, .* max_len=20: leave it out"):
        measure_throughput("toy", lm, prompts, WORK, OPTIONS)
    with pytest.raises(InvalidOption, match=r"^strategy 'autoregressive' drafts nothing"):
        measure_throughput("toy", lm, prompts[:1], replace(WORK, against="undrafted"), OPTIONS)
    assert not lm._has_engine


def test_lengths_have_the_mean_and_the_spread_that_are_asked_for():
    for spread in (0.0, 0.5, 1.5):
        lengths = np.array(draw_lengths(100, spread, [10**6] * 4000))
        assert lengths.mean() == pytest.approx(100, rel=0.05)
        assert lengths.std() == pytest.approx(100 * spread, rel=0.1)
    assert set(draw_lengths(100, 2.0, [3] * 50)) == {1, 2, 3}


@pytest.mark.slow
def test_a_static_batch_writes_each_text_to_its_own_length(trained_folder):
    lm = jaxinfer.load(trained_folder, max_len=200)
    asked = [(encode_bytes("The old"), 3), (encode_bytes("One"), 40)]
    assert run_static(lm, asked, "autoregressive", SamplingParams(ignore_eos=True)) == 43


def test_what_one_client_is_refused_ends_the_measurement():
    def refuse(prompt):
        raise EngineBusy("not now")

    with pytest.raises(EngineBusy):
        _by_clients(refuse, [[1], [2]], 2)


def test_the_table():
    loads = (
        Load("static", 8.0, 13, 1000, 10.0, 100.0),
        Load("clients", 8.0, 13, 1000, 5.0, 200.0, 0.1234, 0.9, 0.02, 0.0312),
        Load("arrivals", 2.5, 13, 1000, 20.0, 50.0, 0.1, 0.2, 0.01, 0.02),
    )
    lines = throughput_lines(ThroughputReport("toy", "cpu", 2, "float32", "autoregressive", 128, 3, loads))
    assert lines[0] == "toy in float32 on cpu (2 cores), autoregressive: up to 128 new tokens each, medians of 3"
    cells = [line.split() for line in lines[3:]]
    assert cells[0] == ["batches", "of", "8", "13", "1000", "100.0"]
    assert cells[1] == ["8", "at", "once", "13", "1000", "200.0", "2.00x", "0.12", "0.90", "20.0", "31.2"]
    assert cells[2][:3] == ["2.5", "a", "second"]


def test_the_chart_shows_the_engine_beside_static_batches_of_the_same_lengths(tmp_path):
    loads = [
        Load(kind, size, 13, 1000, 10.0, speed, spread=spread)
        for spread, ratio in ((0.0, 1.0), (1.0, 2.5))
        for size in (1.0, 8.0)
        for kind, speed in (("static", 100.0), ("clients", 100 * ratio))
    ]
    report = ThroughputReport("toy", "cpu", 2, "float32", "autoregressive", 128, 3, tuple(loads))
    draw_throughput(report, tmp_path / "chart.svg")
    assert (tmp_path / "chart.svg").read_text().count("<svg") == 1
    lines = throughput_lines(report)
    assert lines[0].endswith("autoregressive: on average 128 new tokens each, medians of 3")
    assert [line.split()[:6] for line in lines[-2:]] == [
        ["batches", "of", "8,", "spread", "1", "13"],
        ["8", "at", "once,", "spread", "1", "13"],
    ]
    assert "2.50x" in lines[-1]


@pytest.mark.exhaustive
def test_the_command(trained_folder, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    options = ["--model", str(trained_folder), "--prompts", str(file), "--requests", "2", "--at-once", "1"]
    options += ["--max-new-tokens", "4", "--repeats", "1", "--json"]
    assert main(["bench", "throughput", *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [load["requests"] for load in report["loads"]] == [2, 2]
    chart = tmp_path / "chart.png"
    assert main(["bench", "throughput", *options, "--spread", "0,1", "--chart", str(chart)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [load["spread"] for load in report["loads"]] == [0, 0, 1, 1]
    assert report["loads"][0]["output_tokens"] == report["loads"][1]["output_tokens"] == 8
    assert report["loads"][2]["output_tokens"] == report["loads"][3]["output_tokens"]
    assert chart.stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rate", "0"], "--rate"),
        (["--at-once", "0"], "--at-once"),
        (["--spread", "1,-1"], "--spread"),
        (["--spread", "1,1"], "--spread"),
        (["--against", "nothing"], "--against"),
        (["--chart", "chart.gif"], "chart.gif"),
        (["--strategy", "nonsense"], "nonsense"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_wrong_options_are_one_line(capsys, options, message):
    assert main(["bench", "throughput", *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
