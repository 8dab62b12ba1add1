"""The table of kernels beside their floors and rivals."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import bench, measure, tuning
from pallas_kernels.case import Case, Rival
from pallas_kernels.chips import CHIPS
from tests.pallas_kernels import small_kernels

ROWS = 1 << 15
BYTES = ROWS * 512 * 4
IN_MORE_STEPS = Rival("slow", small_kernels.double, ({"steps": 2048}, {"steps": 512}, {"steps": 1}))
CASE = Case(
    kernel="doubling",
    name="rows",
    function=partial(small_kernels.double, steps=64),
    arguments=(jax.ShapeDtypeStruct((ROWS, 512), jnp.float32),),
    blocks=({"steps": 64},),
    shape={"rows": ROWS},
    mxu_flops=1000,
    floor_bytes=2 * BYTES,
    rivals=(IN_MORE_STEPS,),
)


@pytest.fixture
def one_kernel(tmp_path, monkeypatch, v5e):
    """Let there be one kernel, of one case, and one process that compiles."""
    monkeypatch.setattr(bench, "Compiler", lambda chip: v5e)
    monkeypatch.setattr(tuning, "table_path", lambda kernel: tmp_path / f"{kernel}.json")
    tuning.write_blocks("doubling", "v5e", CASE.shape, {"steps": 64})
    monkeypatch.setattr(measure, "kernel_names", lambda: ["doubling"])
    monkeypatch.setattr(measure, "kernel_cases", lambda kernel: (CASE,))


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_the_json_object_has_the_cases_with_floors_and_the_best_of_the_rivals(one_kernel, capsys):
    assert bench.run(["--tpu", "v5e", "--json"]) == 0
    out, progress = capsys.readouterr()
    assert "[1/1] doubling rows" in progress
    (found,) = json.loads(out)["cases"]
    assert {
        "kernel": "doubling",
        "case": "rows",
        "hbm_bytes": 2 * BYTES,
        "floor_bytes": 2 * BYTES,
    }.items() <= found.items()
    assert found["floor_cycles"] == round(2 * BYTES / 819e9 * 1.5e9)
    assert found["blocks"] == {"steps": 64}
    assert found["grid_steps"] == 66
    assert found["steps_executed"] == 64
    # The rival's best is at 512 steps: at one it does not fit into vector memory.
    assert found["jax_blocks"] == {"steps": 512}
    assert 1.0 < found["jax_cycles"] / found["cycles"] < 3.0
    assert found["seconds"] == found["memory_seconds"] > found["compute_seconds"]


@pytest.mark.tpu_compile
def test_the_table_shows_what_is_known(one_kernel, capsys):
    assert bench.run(["--tpu", "v5e", "--kernel", "doubling", "--no-rivals"]) == 0
    title, head, row = capsys.readouterr().out.splitlines()
    assert title == "doubling, v5e"
    assert [name for name, _ in bench._COLUMNS if name not in head] == []
    assert row.split()[:2] == ["rows", "steps=64"]
    assert "64/66" in row
    assert row.split()[-1] == "-"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--tpu", "v99"], "unknown TPU 'v99': choose one of"), (["--kernel", "fast"], "unknown kernel 'fast': choose")],
)
def test_a_mistake_ends_in_one_line(arguments, message, capsys):
    assert bench.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_a_floor_is_the_longer_of_operations_and_bytes():
    chip = CHIPS["v5e"]
    floor = measure.case_floor(CASE, chip)
    assert (floor.bound, floor.seconds) == ("HBM", pytest.approx(2 * BYTES / 819e9))
    busy = Case("k", "c", CASE.function, (), (), {}, mxu_flops=394 * 10**9, floor_bytes=1, int8=True)
    assert measure.case_floor(busy, chip).seconds == pytest.approx(1e-3)
    # TPU7x has no int8 units, and shows its two cores as two devices.
    assert measure.case_floor(busy, CHIPS["tpu7x"]).seconds == pytest.approx(394e9 / (2307e12 / 2))
