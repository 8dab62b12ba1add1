"""How long threads have waited for programs: each of two that wait for one program has waited, together not longer."""

import threading
import time

import numpy as np

from jaxinfer.decoding.programs import Programs
from jaxinfer.engine.kept_pages import KeptPages
from jaxinfer.models.decoder import Decoder
from tests.toys import TINY_LLAMA, float32_backend


def slow_programs(monkeypatch, seconds):
    programs = Programs(Decoder(TINY_LLAMA, float32_backend()))
    monkeypatch.setattr(programs, "_make", lambda key, function, *others: time.sleep(seconds) or function)
    return programs


def in_another_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_thread_has_waited_for_what_it_called_itself(monkeypatch):
    programs, found = slow_programs(monkeypatch, 0.2), []

    def work():
        programs.run("x", lambda *arguments: None, (), np.zeros(1))
        found.append(programs.waited_seconds)

    for thread in [in_another_thread(work) for _ in range(2)]:
        thread.join()
    assert all(0.19 < waited < programs.compile_seconds for waited in found)
    assert programs.waited_seconds == 0


def test_the_clock_of_kept_pages_goes_on_whoever_waits(monkeypatch):
    """It stands still while the thread whose turn it is waits, and never goes back."""
    programs = slow_programs(monkeypatch, 0.1)
    pages = KeptPages(programs, max_len=64, eos_token_ids=lambda: (), tokenizer=lambda: None)
    seen = []

    def turn():
        with pages._turn():
            seen.append(pages._now())
            programs.run(("y", len(seen)), lambda *arguments: None, (), np.zeros(1))
            seen.append(pages._now())
            with pages._turn():  # as a callback does
                programs.run(("z", len(seen)), lambda *arguments: None, (), np.zeros(1))
                seen.append(pages._now())
            seen.append(pages._now())

    others = [in_another_thread(lambda: programs.run("x", lambda *arguments: None, (), np.zeros(1))) for _ in range(4)]
    for _ in range(2):
        turn()
        in_another_thread(turn).join()
    for thread in others:
        thread.join()
    assert seen == sorted(seen)
    assert seen[-1] - seen[0] < 0.3  # of 0.8 seconds
