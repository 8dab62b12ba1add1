"""Block sizes: found by the nearest shape, and searched for by what the compiler says."""

import json

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import autotune, tuning
from pallas_kernels.case import Case
from pallas_kernels.scalar_unit import ScheduleError
from pallas_kernels.schedule import Compiler, Operation, Schedule
from tests.pallas_kernels import small_kernels

TABLE = {
    "v5e": {
        "H=128,T=2048,dtype=bfloat16": {"block": 512},
        "H=128,T=256,dtype=bfloat16": {"block": 256},
        "H=128,T=2048,dtype=float32": {"block": 128},
    },
    "v6e": {"H=128,T=2048,dtype=bfloat16": {"block": 1024}},
}


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Keep all tables in a folder of the test."""
    monkeypatch.setattr(tuning, "table_path", lambda kernel: tmp_path / f"{kernel}.json")
    (tmp_path / "known.json").write_text(json.dumps(TABLE))
    return tmp_path


@pytest.mark.parametrize(
    ("chip", "shape", "block"),
    [
        ("v5e", {"H": 128, "T": 2048, "dtype": "bfloat16"}, 512),
        ("v6e", {"H": 128, "T": 2048, "dtype": "bfloat16"}, 1024),
        # No number outweighs another dtype.
        ("v5e", {"H": 64, "T": 256, "dtype": "float32"}, 128),
        # 600 is nearer to 256 than to 2048, as ratios go; 1024 is not.
        ("v5e", {"H": 128, "T": 600, "dtype": "bfloat16"}, 256),
        ("v5e", {"H": 128, "T": 1024, "dtype": "bfloat16"}, 512),
        # A chip that nothing was tuned for takes v5e's.
        ("v5p", {"H": 128, "T": 200, "dtype": "bfloat16"}, 256),
    ],
)
def test_the_nearest_shape_decides(table, chip, shape, block):
    assert tuning.tuned_blocks("known", shape, chip) == {"block": block}


def test_without_a_tpu_in_sight_the_chip_is_v5e(table):
    assert tuning.current_chip() == "v5e"
    assert tuning.tuned_blocks("known", {"H": 128, "T": 2048, "dtype": "bfloat16"}) == {"block": 512}


def test_a_kernel_without_a_table_says_what_makes_one(table):
    with pytest.raises(ValueError, match=r"other has no tuned blocks for v6e: run python -m pallas_kernels\.autotune"):
        tuning.tuned_blocks("other", {"T": 1}, "v6e")


@pytest.mark.slow
def test_what_is_written_is_read_and_leaves_the_rest(table):
    tuning.write_blocks("known", "v5e", {"T": 64, "H": 128, "dtype": "bfloat16"}, {"block": 8})
    read = tuning.read_table("known")
    assert read["v5e"].pop("H=128,T=64,dtype=bfloat16") == {"block": 8}
    assert read == TABLE
    assert [path.name for path in table.iterdir()] == ["known.json"]


def doubling(name: str, rows: int) -> Case:
    """Return a case of a kernel that copies: the more it does in a step, the fewer steps cost, until it is too much."""
    return Case(
        kernel="doubling",
        name=name,
        function=small_kernels.double,
        arguments=(jax.ShapeDtypeStruct((rows, 512), jnp.float32),),
        blocks=({"steps": 1}, {"steps": rows // 8}, {"steps": 32}),
        shape={"rows": rows},
        mxu_flops=0,
        floor_bytes=2 * rows * 512 * 4,
    )


def estimated(function, arguments, *, donated=(), steps):
    """Answer for the compiler, of `doubling`: a step costs something, and all at once does not fit."""
    if steps == 1:
        raise ScheduleError("it does not fit")
    cycles = arguments[0].shape[0] + 100 * steps
    operation = Operation("double", cycles, cycles, hbm_bytes=1, slots={}, loops=(), blocks=())
    return Schedule("v5e", (operation,), hbm_bytes=1, temporary_bytes=0, peak_bytes=0, argument_bytes=0)


@pytest.mark.slow
def test_a_search_that_was_stopped_goes_on_where_it_was(table, monkeypatch, capsys):
    """The best of a shape is written as soon as it is known; what was measured is not compiled again."""
    with Compiler("v5e") as compiler:
        monkeypatch.setattr(compiler, "schedule", estimated)
        check_search(compiler, table, monkeypatch, capsys)


@pytest.mark.exhaustive
@pytest.mark.tpu_compile
def test_a_search_by_the_compiler_goes_on_where_it_was_stopped(table, monkeypatch, capsys, v5e):
    check_search(v5e, table, monkeypatch, capsys)


def check_search(compiler, table, monkeypatch, capsys):
    log = table / "log.jsonl"
    compiled = []
    schedule = compiler.schedule

    def stop_at_the_fifth(function, arguments, **blocks):
        compiled.append(blocks["steps"])
        if len(compiled) == 5:
            raise KeyboardInterrupt
        return schedule(function, arguments, **blocks)

    monkeypatch.setattr(compiler, "schedule", stop_at_the_fifth)
    cases = [doubling("small", 1 << 14), doubling("large", 1 << 15)]
    with pytest.raises(KeyboardInterrupt):
        autotune.tune(cases, compiler, autotune.Log(log))
    assert tuning.read_table("doubling") == {"v5e": {"rows=16384": {"steps": 32}}}
    log.write_text(log.read_text() + '{"key": "cut off')
    assert autotune.tune(cases, compiler, autotune.Log(log)) == {
        "rows=16384": {"steps": 32},
        "rows=32768": {"steps": 32},
    }
    # All of the small one, one of the large, the one that stopped; then what was left of the large.
    assert compiled == [1, 2048, 32, 1, 4096, 4096, 32]
    assert tuning.tuned_blocks("doubling", {"rows": 1 << 15}, "v5e") == {"steps": 32}
    shown = capsys.readouterr().err
    assert "[2/2] doubling rows=32768" in shown
    assert "steps=1: -" in shown


@pytest.mark.exhaustive
@pytest.mark.tpu_compile
def test_a_shape_that_no_blocks_compile_for_is_an_error(table, v5e):
    case = Case(
        "large", "all", small_kernels.too_large, (jax.ShapeDtypeStruct((8, 128), jnp.float32),), ({},), {}, 0, 1
    )
    with pytest.raises(ScheduleError, match="large compiles for v5e with none of its"):
        autotune.tune([case], v5e, autotune.Log(table / "log.jsonl"))
