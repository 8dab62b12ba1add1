"""What one request asks for delays or changes no other: long reading, and strategies with texts of their own."""

import threading

import pytest

from jaxinfer.errors import InvalidOption
from jaxinfer.server import endpoints
from jaxinfer.server.served import Served
from tests.server.harness import PROMPT, SECONDS, Running

# More than asyncio's own threads on two cores.
NUM_SLOW = 12
SLOW_SEED = 77


def test_requests_that_take_long_to_read_keep_nobody_waiting(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those whose grammars take seconds to compile."""
    may_go_on, being_read, submit = threading.Event(), [], endpoints.submit

    def slow(engine, job, *others, **options):
        if job.sampling.seed == SLOW_SEED:
            being_read.append(job)
            assert may_go_on.wait(SECONDS)
        return submit(engine, job, *others, **options)

    monkeypatch.setattr(endpoints, "submit", slow)
    answers = []
    asked = {"prompt": PROMPT, "max_tokens": 1, "seed": SLOW_SEED}
    threads = [threading.Thread(target=lambda: answers.append(server.complete(**asked))) for _ in range(NUM_SLOW)]
    try:
        for thread in threads:
            thread.start()
        server.until(lambda: len(being_read) == NUM_SLOW)
        assert server.complete(prompt=PROMPT, max_tokens=2).status_code == 200
        assert not answers
    finally:
        may_go_on.set()
        for thread in threads:
            thread.join(SECONDS)
    assert [answer.status_code for answer in answers] == [200] * NUM_SLOW


def test_a_strategy_that_says_how_many_texts_a_request_gets_is_refused(server: Running) -> None:
    for strategy in ("beam:width=2,n=2", "beam:width=4,n=3"):
        with pytest.raises(InvalidOption, match="leave n out"):
            Served(server.lm, server.engine, server.served.options, strategy)
    assert Served(server.lm, server.engine, server.served.options, "beam:width=2").strategy == "beam:width=2"
