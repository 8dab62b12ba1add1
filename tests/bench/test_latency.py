"""The latency benchmark reports what it measured, beside limits that are counted and measured rightly."""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import pytest

from jaxinfer.bench.latency import measure as latency
from jaxinfer.bench.latency.machine import measure_bandwidth, measure_product
from jaxinfer.bench.latency.measure import LatencyReport, Workload, measure_latency
from jaxinfer.bench.latency.roofline import Cost, decode_cost, prefill_cost
from jaxinfer.bench.latency.table import latency_lines
from jaxinfer.cli.main import main
from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import Alibi
from jaxinfer.ops.backend import choose_backend
from tests.toys import TINY_LLAMA, random_params

WORKLOAD = Workload(prompt_tokens=8, new_tokens=4, batch=2, repeats=2)


@pytest.fixture(autouse=True)
def small_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the machine with a small array and a small product: the tests are about the arithmetic."""
    monkeypatch.setattr(latency, "measure_bandwidth", partial(measure_bandwidth, 1 << 20))
    monkeypatch.setattr(latency, "measure_product", partial(measure_product, width=64))


def assert_consistent(report: LatencyReport) -> None:
    for run in report.runs:
        sides = [run.jaxinfer] if run.transformers is None else [run.jaxinfer, run.transformers]
        for speed in sides:
            steps = speed.decode_tokens_per_second / report.workload.batch
            assert speed.bytes_per_second == pytest.approx(run.decode_bytes_per_step * steps)
            assert speed.share_of_bandwidth == pytest.approx(speed.bytes_per_second / report.bandwidth.bytes_per_second)
            assert speed.prefill_tokens_per_second > 0
            assert speed.first_token_seconds > 0
        assert run.jaxinfer.compile_seconds > 0


@pytest.mark.slow
def test_a_report_agrees_with_itself_and_names_every_dtype_and_json_is_one_object(
    tiny_llama_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command's report is kept; its JSON is that and nothing else."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    reports: list[LatencyReport] = []
    monkeypatch.setattr(latency, "measure_latency", lambda *args, **more: keep(reports, measure_latency(*args, **more)))
    sizes = ["--prompt-tokens", "8", "--new-tokens", "4", "--batch", "2", "--repeats", "2"]
    asked = ["--model", str(tiny_llama_folder()), "--dtype", "float32,bfloat16", "--json", *sizes]
    assert main(["bench", "latency", *asked]) == 0
    out, err = capsys.readouterr()
    (report,), found = reports, json.loads(out)
    assert_consistent(report)
    assert [run.dtype for run in report.runs] == ["float32", "bfloat16"]
    assert report.runs[0].decode_bytes_per_step > report.runs[1].decode_bytes_per_step
    table = "\n".join(latency_lines(report))
    for run in report.runs:
        assert f"{run.jaxinfer.decode_tokens_per_second:.1f}" in table
        assert f"roofline: prefill {run.prefill_roofline:.0f} tok/s" in table
    assert err == ""
    assert found["workload"] == {"prompt_tokens": 8, "new_tokens": 4, "batch": 2, "repeats": 2}
    told = found["runs"][0]
    assert told["jaxinfer"]["decode_tokens_per_second"] == report.runs[0].jaxinfer.decode_tokens_per_second > 0
    assert told["transformers"] is None


def keep(reports: list[LatencyReport], report: LatencyReport) -> LatencyReport:
    reports.append(report)
    return report


@pytest.mark.exhaustive
@pytest.mark.parity
def test_transformers_runs_beside_on_the_same_checkpoint(tiny_llama_folder: Callable[..., Path]) -> None:
    pytest.importorskip("torch")
    report = measure_latency(str(tiny_llama_folder()), ("float32",), WORKLOAD, rival="transformers")
    assert_consistent(report)
    (run,) = report.runs
    assert run.transformers is not None
    assert run.ratios is not None
    ratio = run.jaxinfer.decode_tokens_per_second / run.transformers.decode_tokens_per_second
    assert run.ratios["decode"] == pytest.approx(ratio)
    assert f"{ratio:.2f}x" in "\n".join(latency_lines(report))


def test_an_absent_rival_is_told_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidOption, match=r"needs torch, transformers, accelerate: pip install"):
        measure_latency("no/such/model/is/opened", ("float32",), WORKLOAD, rival="transformers")


def test_more_tokens_than_the_context_holds_are_refused(tiny_llama_folder: Callable[..., Path]) -> None:
    with pytest.raises(InvalidOption, match=r"1020 prompt tokens and 8 new ones pass the model's context of 1024"):
        measure_latency(str(tiny_llama_folder()), ("float32",), Workload(1020, 8, 1, 1))


def test_costs_are_those_counted_by_hand() -> None:
    """Two layers, width 32, feed-forward 64, 4 query and 2 key heads of 8, 258 tokens, tied embeddings, float32."""
    params = random_params(TINY_LLAMA)
    block = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 64 * 32 + 2 * 32
    everything = 2 * block + 258 * 32 + (0 if TINY_LLAMA.tied_embeddings else 258 * 32) + 32
    read = everything - (0 if TINY_LLAMA.tied_embeddings else 258 * 32)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == everything
    backend = choose_backend("float32", "cpu")
    decode = decode_cost(TINY_LLAMA, params, backend, batch=3, length=10.0)
    assert decode.num_bytes == 4 * read + 3 * (2 * 2 * 2 * 8 * 4 * 10)
    assert decode.operations == 3 * (2 * (2 * block + 258 * 32) + 2 * 4 * 4 * 8 * 10)
    prefill = prefill_cost(TINY_LLAMA, params, backend, batch=3, num_tokens=10)
    assert prefill.num_bytes == 4 * read
    assert prefill.operations == 3 * (2 * 2 * block * 10 + 2 * 2 * 4 * 8 * 100 + 2 * 258 * 32)


def test_lanes_that_hold_positions_are_read_and_multiplied() -> None:
    """A head of 8 with ALiBi is 9 lanes wide in float32."""
    params, backend = random_params(TINY_LLAMA), choose_backend("float32", "cpu")
    config = replace(TINY_LLAMA, alibi=Alibi((0.5,) * 4))
    plain, wide = (decode_cost(each, params, backend, batch=3, length=10.0) for each in (TINY_LLAMA, config))
    assert wide.num_bytes - plain.num_bytes == 3 * (2 * 2 * 2 * 4 * 10)
    assert wide.operations - plain.operations == 3 * (2 * 4 * 4 * 10)
    plain, wide = (prefill_cost(each, params, backend, batch=3, num_tokens=10) for each in (TINY_LLAMA, config))
    assert wide.operations - plain.operations == 3 * (2 * 2 * 4 * 100)


def test_the_slower_limit_decides() -> None:
    assert Cost(num_bytes=100.0, operations=10.0).seconds(bytes_per_second=10.0, operations_per_second=10.0) == 10
    assert Cost(num_bytes=10.0, operations=100.0).seconds(bytes_per_second=10.0, operations_per_second=10.0) == 10
