"""A server's process that takes no requests: it computes with the one that does, until that one ends."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from jaxinfer.engine.engine import Engine


def follow(engine: Engine, leave: Callable[[int], object] = os._exit) -> None:
    """Follow the leader until it has closed its engine.

    A signal to end, which a terminal sends to all processes, leaves it to the leader to end them; the second one ends
    this process at once by ``leave``.
    """
    signalled = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        if signalled.is_set():
            leave(128 + number)
        signalled.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        engine.close()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
