"""An engine's plan: rows and pages that fit beside weights and temporaries, and what a step of them moves."""

import dataclasses

import pytest

from jaxinfer.engine.config import EngineConfig
from jaxinfer.errors import InvalidOption
from jaxinfer.parallel.mesh import MeshConfig
from jaxinfer.planning.compile import CompiledProgram, DoesNotFit
from jaxinfer.planning.engine_plan import EnginePlan, most_rows, plan_engine, step_work
from jaxinfer.planning.engine_window import EngineDeployment, compile_window
from jaxinfer.planning.hlo.walk import Instruction
from jaxinfer.planning.known_models import planned_config
from tests.planning.models import LLAMA_2_7B

TINY = dataclasses.replace(
    LLAMA_2_7B, num_layers=2, model_dim=256, ffn_dim=512, num_heads=2, num_kv_heads=2, vocab_size=1024
)
# A page of 64 slots of 32 layers, keys and values, 32 heads of 128 numbers, of which each device has four.
PAGE = 2 * 32 * 64 * 32 * 128 * 2
EIGHT = EngineDeployment(LLAMA_2_7B, "v5e:2x4", MeshConfig(tensor=8), max_len=2048)
GIB = 1 << 30


def program(weights: int, pool: int, temporaries: int, hlo: str = "") -> CompiledProgram:
    """Return what the compiler might say: all of the pools and nothing else is written in place."""
    return CompiledProgram(weights + pool, pool, pool, temporaries, 0, pool, 1.0, {}, hlo)


def test_a_text_has_the_pages_of_its_tokens_and_of_the_slot_behind_them():
    assert EIGHT.pages_per_row == 33
    assert dataclasses.replace(EIGHT, max_len=2047).pages_per_row == 32
    assert dataclasses.replace(EIGHT, engine=EngineConfig(page_size=128)).pages_per_row == 17
    # Page 0 belongs to nobody.
    assert EIGHT.pages_for(64) == 64 * 33 + 1
    assert EIGHT.page_bytes == PAGE // 8
    # An eighth of 32,000 rows of the embedding, filled up to whole tiles, of which a step reads a few.
    assert EIGHT.weights_bytes - EIGHT.read_bytes == 4096 * 4096 * 2


@pytest.mark.parametrize(
    ("each", "first", "parts", "most", "refused"),
    [
        (10, 9, 1, 9, None),  # the guess fits, and no more
        (10, 4, 1, 9, None),
        (12, 9, 1, 7, 9),  # temporaries take more than was guessed
        (10.1, 9, 1, 8, 9),  # the compiler rounds down what it needs: a number that it refused is not tried again
        (91, 9, 1, 0, 1),
        (10, 9, 4, 8, None),
        (12, 9, 4, 4, 8),
        (31, 9, 4, 2, 8),  # fewer than the parts: each has all
    ],
)
def test_the_most_rows_are_found_that_the_compiler_accepts(each, first, parts, most, refused):
    """Of 100 bytes the weights take ten, and a row ``each``."""
    tried = []

    def compiled(rows: int) -> CompiledProgram:
        tried.append(rows)
        if 10 + rows * each > 100:
            raise DoesNotFit("too much", int(10 + rows * each), {})
        return program(10, int(rows * each), 0)

    found = most_rows(compiled, 100, 10, first, parts)
    assert len(tried) == len(set(tried)) <= 6
    assert (found.rows if found else 0) == most
    assert found is None or found.refused == refused


@pytest.fixture
def planned(monkeypatch):
    """Return a function that plans with a compiler whose windows take so many bytes a row besides their pages."""

    def plan(asked: EngineDeployment, a_row: int) -> EnginePlan:
        def compiled(asked: EngineDeployment, rows: int) -> CompiledProgram:
            pool = asked.pages_for(rows) * asked.page_bytes
            found = program(asked.weights_bytes, pool, rows * a_row)
            if found.total_bytes > asked.chip.device_hbm_bytes:
                raise DoesNotFit("too much", found.total_bytes, {})
            return dataclasses.replace(found, hlo=MOVING)

        monkeypatch.setattr("jaxinfer.planning.engine_plan.compile_window", compiled)
        return plan_engine(asked)

    return plan


MOVING = """HloModule jit_run, num_partitions=8

ENTRY %main (x: f32[1024,1024]) -> f32[1024,1024] {
  %x = f32[1024,1024]{1,0} parameter(0)
  ROOT %y = f32[1024,1024]{1,0} negate(%x)
}
"""


def test_pages_fit_beside_weights_and_temporaries(planned):
    found = planned(dataclasses.replace(EIGHT, rows=64), a_row=GIB // 64)
    assert found.fits
    window = found.window
    assert (window.rows, window.temporaries_bytes, window.pools_in_place) == (64, GIB, True)
    assert window.pages == (found.hbm_capacity_bytes - EIGHT.weights_bytes - GIB) // (PAGE // 8)
    assert window.temporaries_share == pytest.approx(GIB / (EIGHT.pages_for(64) * PAGE / 8))
    assert window.floor_bytes == EIGHT.read_bytes + 64 * 33 * PAGE // 8
    assert window.tokens_per_second == pytest.approx(64 * window.tokens_per_second_per_row)


def test_without_a_number_as_many_rows_are_planned_as_fit(planned):
    found = planned(EIGHT, a_row=PAGE)
    free = found.hbm_capacity_bytes - EIGHT.weights_bytes - PAGE // 8
    assert found.window.rows == free // (33 * PAGE // 8 + PAGE)
    assert found.window.total_bytes <= found.hbm_capacity_bytes


@pytest.mark.slow
def test_rows_that_do_not_fit_leave_those_that_do(planned):
    found = planned(dataclasses.replace(EIGHT, rows=640), a_row=0)
    assert (found.fits, found.rows_asked) == (False, 640)
    assert 100 < found.window.rows < 640
    none = planned(dataclasses.replace(EIGHT, topology="v5e:1x1", mesh=MeshConfig(), max_len=1 << 17), a_row=0)
    assert (none.fits, none.window) == (False, None)


def test_what_a_window_does_once_is_shared_among_its_steps():
    def found(loops: int, read: int, group: int) -> Instruction:
        opcode = "all-reduce" if group else "add"
        return Instruction("x", opcode, 1, 4, loops, 0, False, 1, read, 0, 0, 0, 8, group)

    work = step_work([found(0, 800, 0), found(1, 100, 0), found(2, 10, 8), found(0, 0, 8)], 8, "v5e:2x4")
    assert work.hbm_bytes == 100 + 10 + 800 // 8
    # A sum of a step crosses eight links, and one of a window an eighth of that.
    assert (work.collectives, work.hops) == ({"all-reduce": (1, 8)}, 8 + 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": MeshConfig(tensor=4)}, "v5e:2x4 has 8 devices, but mesh tensor=4 is of 4"),
        (
            {"mesh": MeshConfig(sequence=2, tensor=4)},
            "expert and tensor alone, not sequence=2,tensor=4",
        ),
        ({"config": planned_config("opt-1.3b"), "max_len": 2049}, "max_len=2049 exceeds the 2048 positions"),
        ({"topology": "h100:8"}, "unknown TPU topology 'h100:8'"),
        ({"dtype": "float31"}, "unknown dtype 'float31'"),
    ],
)
def test_an_engine_that_cannot_be_planned_is_refused_in_one_line(changes, message):
    with pytest.raises(InvalidOption, match=message) as caught:
        _ = dataclasses.replace(EIGHT, **changes).split
    assert "\n" not in str(caught.value)


def test_a_window_that_does_not_compile_is_one_clear_error(monkeypatch):
    def fails(*arguments: object) -> None:
        raise NotImplementedError("cannot be split\nthe rest of it")

    monkeypatch.setattr("jaxinfer.planning.engine_window.compile_one", fails)
    asked = EngineDeployment(TINY, "v5e:1x1", MeshConfig(), max_len=256)
    with pytest.raises(InvalidOption, match=r"window does not compile for v5e:1x1 as tensor=1: cannot be split$"):
        compile_window(asked, 2)


@pytest.mark.exhaustive
@pytest.mark.tpu_compile
def test_a_window_on_one_chip_reads_weights_and_pages_once_and_where_they_lie():
    """The pools are too large to be kept in vector memory, where a program may read them for nothing."""
    window = plan_engine(EngineDeployment(TINY, "v5e:1x1", MeshConfig(), max_len=80_000, rows=2)).window
    assert (window.pools_in_place, window.pages_in_place) == (True, True)
    assert 1 <= window.hbm_bytes / window.floor_bytes < 1.1


@pytest.mark.exhaustive
@pytest.mark.tpu_compile
def test_where_data_splits_the_rows_each_device_reads_the_pages_of_its_own():
    asked = EngineDeployment(TINY, "v5e:2x2", MeshConfig(data=2, tensor=2), max_len=40_000, rows=8)
    window = plan_engine(asked).window
    assert (window.pools_in_place, window.pages_in_place) == (True, True)
    assert 1 <= window.hbm_bytes / window.floor_bytes < 1.05


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_on_a_mesh_each_device_reads_the_pages_of_its_heads_where_they_lie():
    found = plan_engine(dataclasses.replace(EIGHT, rows=64))
    assert found.fits
    window = found.window
    assert (window.pools_in_place, window.pages_in_place) == (True, True)
    assert 1 <= window.hbm_bytes / window.floor_bytes < 1.05
    assert window.temporaries_share < 0.02
    assert window.latency_seconds == pytest.approx(65 * 8e-6, rel=0.1)


@pytest.mark.exhaustive
@pytest.mark.tpu_compile
def test_the_rows_of_llama_2_7b_that_fit_one_v5e_chip_are_compiled():
    asked = EngineDeployment(LLAMA_2_7B, "v5e:1x1", MeshConfig(), max_len=2048)
    window = plan_engine(asked).window
    assert window.rows == 3
    assert window.hbm_bytes / window.floor_bytes < 1.05
