"""Kernels are held to their references where they run, and a failure is said, written down and returned."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from pallas_kernels import validate
from pallas_kernels.case import Case
from pallas_kernels.chips import CHIPS
from pallas_kernels.measure import kernel_cases, kernel_names, toy_cases
from pallas_kernels.random_inputs import random_arguments
from pallas_kernels.timing import seconds_a_call
from pallas_kernels.validate import check_case


def double(x, *, interpret=False):
    return 2 * x


CASE = Case(
    "doubling",
    "toy",
    double,
    (jax.ShapeDtypeStruct((8, 128), jnp.float32),),
    ({},),
    {"rows": 8},
    mxu_flops=0,
    floor_bytes=2 * 8 * 128 * 4,
    reference=lambda x: x + x,
)


@pytest.mark.parametrize("kernel", kernel_names())
@pytest.mark.parametrize("most", [1, pytest.param(None, marks=pytest.mark.exhaustive)], ids=["first", "all"])
def test_references_take_and_give_what_their_kernels_do(kernel, most):
    """At real sizes, of which nothing is computed here; toys run in the notebook's test."""
    for case in (*kernel_cases(kernel)[:most], *toy_cases(kernel)[:most]):
        assert case.reference is not None
        described = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in case.arguments]
        found, expected = (
            jax.tree.map(lambda array: array.shape, jax.eval_shape(each, *described))
            for each in (case.function, case.reference)
        )
        assert jax.tree.leaves(found) == jax.tree.leaves(expected)


def test_a_case_that_is_right_passes_and_is_timed_beside_its_floor_on_a_chip():
    interpreted, on_chip = check_case(CASE, None), check_case(CASE, CHIPS["v5e"])
    assert interpreted.passes
    assert interpreted.error == 0
    assert interpreted.seconds is None
    assert on_chip.passes
    assert on_chip.seconds is not None
    assert on_chip.floor_seconds == CASE.floor_bytes / 819e9
    assert "x the HBM floor" in on_chip.line()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"reference": lambda x: 2.01 * x}, "error 5.0e-03 exceeds 1e-05"),
        ({"reference": lambda x: x + jnp.nan}, "error nan exceeds"),
        ({"function": lambda x, interpret: x.reshape(7, -1)}, "TypeError: cannot reshape"),
    ],
)
def test_what_is_wrong_is_said_written_and_returned(change, reason, monkeypatch, tmp_path, capsys):
    wrong = dataclasses.replace(CASE, name="wrong", **change)
    monkeypatch.setattr(validate, "select_cases", lambda kernels, part: [CASE])
    monkeypatch.setattr(validate, "toy_cases", lambda kernel: (wrong, CASE))
    path = tmp_path / "report.json"
    assert validate.run(["--json", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("FAILED  doubling wrong: ")
    assert lines[2].startswith("ok      doubling toy: ")
    assert lines[-1] == "1 passed, 1 failed, 0 skipped"
    report = json.loads(path.read_text())
    assert not report["passes"]
    assert [case["passes"] for case in report["cases"]] == [False, True]
    assert reason in report["cases"][0]["failure"]


@pytest.mark.exhaustive
def test_what_does_not_fit_is_skipped_and_nothing_run_is_no_pass(monkeypatch, tmp_path):
    large = dataclasses.replace(CASE, arguments=(jax.ShapeDtypeStruct((1 << 15, 1 << 18), jnp.float32),))
    assert check_case(large, CHIPS["v5e"]).skipped == "it takes about 96 GiB"
    monkeypatch.setattr(validate, "select_cases", lambda kernels, part: [CASE])
    monkeypatch.setattr(validate, "toy_cases", lambda kernel: (dataclasses.replace(CASE, reference=None),))
    assert validate.run([]) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kernel", "fast"], "error: unknown kernel 'fast'"),
        (["--case", "nonsense"], "error: no case has 'nonsense'"),
    ],
)
def test_a_mistake_ends_in_one_line(arguments, message, capsys):
    assert validate.run(arguments) == 2
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.exhaustive
def test_random_caches_end_in_zeros_where_their_heads_do():
    (case,) = toy_cases("flash_decode")
    _, keys_LBSF, *_ = random_arguments(case)
    assert keys_LBSF.shape[-1] == 256
    assert jnp.all(keys_LBSF[..., 192:] == 0)
    assert jnp.all(jnp.any(keys_LBSF[..., :192] != 0, axis=-1))


@pytest.mark.exhaustive
def test_calls_are_counted_apart_from_what_starts_them(monkeypatch):
    """By a clock that goes 5 seconds on whenever it is read and 3 with each call."""
    clock = [0.0]

    def go_on(seconds: float) -> np.float32:
        clock[0] += seconds
        return np.float32(1)

    def op(x):
        return x * io_callback(lambda: go_on(3.0), jax.ShapeDtypeStruct((), jnp.float32), ordered=True)

    monkeypatch.setattr("time.perf_counter", lambda: go_on(5.0) and clock[0])
    assert seconds_a_call(op, (jnp.ones(4),), None) == 3.0
    assert seconds_a_call(op, (jnp.ones(4),), 0.01) == 3.0
