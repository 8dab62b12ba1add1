"""Programs are prepared without running, in the background if asked, and made once however many threads ask."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cache.layouts import PagedLayout
from jaxinfer.decoding.live_programs import Bound, LivePrograms
from jaxinfer.decoding.programs import Programs
from jaxinfer.models.decoder import Decoder
from tests.toys import TINY_LLAMA, float32_backend

DESCRIBED = (), jax.ShapeDtypeStruct((3,), np.float32)
GIVEN = (), np.arange(3, dtype=np.float32)


@pytest.fixture
def programs() -> Programs:
    return Programs(Decoder(TINY_LLAMA, float32_backend()), live=LivePrograms(Bound()))


def double(_, numbers):
    return 2 * numbers


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_is_prepared_by_description_runs_at_once(programs):
    assert not programs.is_ready("double", *DESCRIBED)
    programs.prepare("double", double, (), *DESCRIBED)
    assert programs.is_ready("double", *DESCRIBED)
    assert programs.is_ready("double", *GIVEN)
    assert not programs.is_ready("double", (), jax.ShapeDtypeStruct((4,), np.float32))
    waited = programs.compile_seconds
    assert programs.run("double", double, (), *GIVEN).tolist() == [0.0, 2.0, 4.0]
    assert (programs.compile_seconds, programs.compilations) == (waited, 1)


def test_one_program_at_a_time_is_prepared_in_the_background(programs):
    began, may_end = threading.Event(), threading.Event()

    def slow(_, numbers):
        began.set()
        may_end.wait(60.0)
        return 3 * numbers

    programs.prepare_soon("slow", slow, (), *DESCRIBED)
    assert began.wait(60.0)
    # Others run, and are not prepared, meanwhile.
    assert programs.run("double", double, (), *GIVEN).tolist() == [0.0, 2.0, 4.0]
    programs.prepare_soon("late", double, (), *DESCRIBED)
    may_end.set()
    wait_for(lambda: programs.is_ready("slow", *DESCRIBED))
    assert not programs.is_ready("late", *DESCRIBED)

    def ask_until_ready() -> bool:
        programs.prepare_soon("late", double, (), *DESCRIBED)
        return programs.is_ready("late", *DESCRIBED)

    wait_for(ask_until_ready)


@pytest.mark.parametrize("is_beside", [False, True])
def test_what_was_begun_in_the_background_can_be_waited_for(programs, is_beside):
    """Also what was begun for the pages of the same model."""
    own = programs.beside(PagedLayout()) if is_beside else programs
    assert programs.settle() == 0

    def slow(_, numbers):
        time.sleep(0.2)
        return 3 * numbers

    own.prepare_soon("slow", slow, (), *DESCRIBED)
    assert programs.settle() == 1
    assert own.is_ready("slow", *DESCRIBED)


def test_what_cannot_be_compiled_is_tried_once_and_raises_where_it_runs(programs):
    tried = []

    def broken(_, numbers):
        tried.append(1)
        raise MemoryError("no room")

    programs.prepare_soon("broken", broken, (), *DESCRIBED)
    wait_for(lambda: programs._failed)
    programs.prepare_soon("broken", broken, (), *DESCRIBED)
    programs.prepare_soon("double", double, (), *DESCRIBED)
    wait_for(lambda: programs.is_ready("double", *DESCRIBED))
    assert len(tried) == 1
    with pytest.raises(MemoryError, match="no room"):
        programs.run("broken", broken, (), *GIVEN)


def test_threads_that_ask_together_get_one_program(programs):
    traced, found = [], []

    def counted(_, numbers):
        traced.append(1)
        time.sleep(0.2)
        return jnp.sum(numbers)

    def ask():
        found.append(float(programs.run("counted", counted, (), *GIVEN)))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (found, len(traced), programs.compilations) == ([3.0] * 4, 1, 1)
