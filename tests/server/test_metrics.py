"""What the server counts is what happened, in the form that Prometheus reads; a server that is stuck says so."""

from dataclasses import fields, replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.server.progress import STUCK_SECONDS, Progress
from tests.server.harness import MODEL, PROMPT, STRATEGY, Running

NUMBERS = {field.name: 0 for field in fields(EngineMetrics) if field.name != "compile_seconds"}
IDLE = EngineMetrics(**NUMBERS, compile_seconds=0.0)


def read(server: Running) -> dict[str, float]:
    """Return all samples by name and labels."""
    text = server.get("/metrics").text
    return {
        sample.name + "".join(f",{name}={value}" for name, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.slow
def test_requests_are_counted(server: Running) -> None:
    request = {"prompt": PROMPT * 4, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "cache_salt": "metrics"}
    before = read(server)
    usages = [server.complete(**request).json()["usage"] for _ in range(2)]
    assert server.complete(prompt=PROMPT, n=0).status_code == 400
    after = read(server)

    def grew(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    cached = usages[1]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    accepted = sum(usage["completion_tokens_details"]["accepted_prediction_tokens"] for usage in usages)
    assert grew("jaxinfer_output_tokens_total") == 24
    assert grew("jaxinfer_cached_tokens_total") == cached
    assert grew("jaxinfer_prompt_tokens_total") == 8 * len(PROMPT) - cached
    assert grew("jaxinfer_accepted_tokens_total") == accepted
    assert grew("jaxinfer_row_steps_total") == grew("jaxinfer_steps_total") == 22 - accepted
    assert grew("jaxinfer_sequences_ended_total,how=finished") == 2
    assert grew("jaxinfer_first_token_seconds_count") == grew("jaxinfer_queue_seconds_count") == 2
    assert grew("jaxinfer_between_tokens_seconds_count") == 22
    assert grew("jaxinfer_tokens_per_step_count") == 2
    assert grew("jaxinfer_http_responses_total,path=/v1/completions,status=200") == 2
    assert grew("jaxinfer_http_responses_total,path=/v1/completions,status=400") == 1
    assert grew("jaxinfer_errors_total,code=invalid_value") == 1
    assert after["jaxinfer_compilations_total"] > 0
    assert [after[f"jaxinfer_requests_{name}"] for name in ("waiting", "prefilling", "running")] == [0, 0, 0]
    pages = [after[f"jaxinfer_pages,state={state}"] for state in ("free", "cached", "in_use")]
    assert sum(pages) == server.engine._groups[0].core.scheduler.held.pool.num_pages - 1
    assert pages[1] > 0
    (info,) = (name for name in after if name.startswith("jaxinfer_info"))
    assert f"model={MODEL}" in info
    assert f"strategy={STRATEGY}" in info


def test_paths_of_strangers_make_no_new_series(server: Running) -> None:
    for number in range(3):
        server.get(f"/{number}")
    assert not [name for name in read(server) if "path=/0" in name]
    assert read(server)["jaxinfer_http_responses_total,path=other,status=404"] >= 3


@pytest.mark.parametrize(
    ("change", "is_stuck"),
    [
        ({"waiting": 1}, True),
        ({}, False),
        ({"waiting": 1, "running": 1}, False),
        ({"waiting": 1, "prefilling": 1}, False),
    ],
    ids=["waits", "idle", "runs", "prefills"],
)
def test_an_engine_is_stuck_where_requests_wait_and_nothing_runs(change: dict[str, int], is_stuck: bool) -> None:
    progress, now = Progress(), replace(IDLE, **change)
    assert not progress.is_stuck(now, 100.0)
    assert not progress.is_stuck(now, 100.0 + STUCK_SECONDS)
    assert progress.is_stuck(now, 101.0 + STUCK_SECONDS) == is_stuck
    # As soon as anything has happened, the time begins anew.
    assert not progress.is_stuck(replace(now, cancelled=1), 102.0 + STUCK_SECONDS)


def test_a_stuck_server_is_alive_but_not_ready(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.get("/ready").json() == {"status": "ok"}
    monkeypatch.setattr(server.served, "progress", Progress())
    monkeypatch.setattr(server.engine, "metrics", lambda: replace(IDLE, waiting=1))
    monkeypatch.setattr("jaxinfer.server.progress.STUCK_SECONDS", 0.0)
    server.get("/ready")
    assert server.get("/ready").status_code == 503
    assert server.get("/health").status_code == 200
