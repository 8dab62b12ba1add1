"""A request waits for the largest program of a kind at most, and for none after warming up."""

import threading
import time

import pytest

import jaxinfer
from jaxinfer.decoding.programs import Programs
from jaxinfer.engine.programs import run_window
from jaxinfer.engine.shapes import levels_from
from jaxinfer.errors import EngineClosed

PROMPTS = ["The old", "A small otter", "One grey", "The quick"]
OPTIONS = {"page_size": 8, "pages": 40, "steps_per_look": 4}


def test_after_warming_up_no_request_waits_for_a_program(trained_folder):
    lm, seen = jaxinfer.load(trained_folder, max_len=64), []
    with lm.engine(**OPTIONS, max_rows=1, prefill_chunk=8) as engine:
        engine.warm_up(lambda done, total: seen.append((done, total)))
        total = seen[0][1]
        assert seen == [(done, total) for done in range(total + 1)]
        before = engine.metrics()
        requests = [engine.submit(prompt, max_new_tokens=5) for prompt in PROMPTS]
        assert all(request.result(60.0).tokens for request in requests)
        after = engine.metrics()
    assert before.compilations >= total
    assert (after.compilations, after.compile_seconds) == (before.compilations, before.compile_seconds)
    with pytest.raises(EngineClosed):
        engine.warm_up()


@pytest.mark.slow
def test_larger_programs_run_until_those_that_fit_are_there(trained_folder):
    """Whatever is ready first, the text is the same."""
    lm = jaxinfer.load(trained_folder, max_len=64)
    (expected,) = lm.generate("The old", max_new_tokens=30)
    with lm.engine(**OPTIONS, max_rows=4, prefill_chunk=16) as engine:
        device, sizes = engine._groups[0].core._device, []
        run = device._run

        def watched(program, *arguments):
            if program.name[0] == "window":
                sizes.append(program.arguments[4].shape[0])
            return run(program, *arguments)

        device._run = watched
        deadline = time.monotonic() + 60.0
        while not sizes or (sizes[-1] != 1 and time.monotonic() < deadline):
            assert engine.submit("The old", max_new_tokens=30).result(60.0).tokens == expected.tokens
        assert (sizes[0], sizes[-1]) == (4, 1)


def test_tables_have_few_widths():
    """None that is more than half of the widest, which then serves as well."""
    assert levels_from(1, 1100) == [1100]
    assert levels_from(1, 2048) == levels_from(1024, 2048) == [1024, 2048]
    assert levels_from(1025, 8256) == [4096, 8256]
    assert levels_from(5000, 8000) == [8000]


@pytest.mark.slow
def test_plain_steps_come_first_and_drafts_once_their_programs_are_there(trained_folder):
    """The first request waits for one program of windows alone, and others are made while it is decoded."""
    lm = jaxinfer.load(trained_folder, max_len=64)
    made, run = [], Programs._get

    def watched(self, function, donated, arguments):
        if getattr(function, "func", None) is run_window:
            made.append((function.args[1].num_nodes, threading.current_thread() is threading.main_thread()))
        return run(self, function, donated, arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Programs, "_get", watched)
        deadline = time.monotonic() + 60.0
        (expected,) = lm.generate("The old", max_new_tokens=30)
        while len(made) < 2 and time.monotonic() < deadline:
            (found,) = lm.generate("The old", max_new_tokens=30, strategy="auto")
            assert found.tokens == expected.tokens
        lm._kept_pages._programs.settle()
    assert made[0] == (1, True)
    assert made[1][0] > 1
    assert not made[1][1]


@pytest.mark.slow
def test_what_steps_cost_beside_a_compiler_is_not_noted(trained_folder, monkeypatch):
    """A program that is compiled in the background takes half of two cores from the steps that run meanwhile."""
    lm = jaxinfer.load(trained_folder, max_len=64)

    def costs() -> dict:
        lm.generate("The old", max_new_tokens=30, strategy="auto")
        pace = lm._kept_pages._core._pace
        return pace.costs().get("0", {})

    with monkeypatch.context() as patch:
        patch.setattr(Programs, "is_preparing", property(lambda self: True))
        assert costs() == {}
    deadline = time.monotonic() + 60.0
    while costs() == {}:
        assert time.monotonic() < deadline
