"""Makes Ctrl-C reach the program wherever it falls."""

import _thread
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_AGAIN_SECONDS = 0.05


@contextmanager
def delivered_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt again where it was lost.

    In a callback out of C++, of which JAX has many, Python cannot raise it: it prints a report and goes on.
    """
    timers: list[threading.Timer] = []
    report = sys.unraisablehook

    def deliver_again(unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            report(unraisable)
            return
        timer = threading.Timer(_AGAIN_SECONDS, _thread.interrupt_main)
        timer.daemon = True
        timers.append(timer)
        timer.start()

    sys.unraisablehook = deliver_again
    try:
        yield
    finally:
        sys.unraisablehook = report
        for timer in timers:
            timer.cancel()
