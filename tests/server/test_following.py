"""A process that follows another one leaves it to that one to end."""

import os
import signal
import threading

from jaxinfer.server.following import follow


class Idle:
    """An engine whose leader closes it after so many seconds."""

    def __init__(self, seconds):
        self._ended = threading.Event()
        threading.Timer(seconds, self._ended.set).start()

    def close(self):
        for number in self.signals:
            os.kill(os.getpid(), number)
        self._ended.wait()


def test_the_first_signal_is_the_leaders_and_the_second_ends_at_once():
    before, codes = signal.getsignal(signal.SIGTERM), []
    engine = Idle(0.05)
    engine.signals = [signal.SIGINT]
    follow(engine, codes.append)
    assert codes == []
    engine = Idle(0.05)
    engine.signals = [signal.SIGINT, signal.SIGTERM]
    follow(engine, codes.append)
    assert codes == [128 + signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before
