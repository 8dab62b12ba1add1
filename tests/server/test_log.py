"""What a server logs is answered again by plain decoding with the same bits, and every other bit is found and named."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxinfer.errors import InvalidOption
from jaxinfer.grammar import Grammar
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.server.log.entry import Entry, LoggedAnswer, LoggedPrompt, read_entry, write_entry
from jaxinfer.server.log.file import open_log, read_log
from jaxinfer.server.log.writer import RequestLog
from tests.cli.conftest import Outcome, run  # noqa: F401 - a fixture
from tests.server.harness import LONG, MODEL, PROMPT, SECONDS, Running
from tests.server.test_lifetime import NAME, process
from tests.server.test_tools import ASKED, TOOLS, calls, use  # noqa: F401 - one is a fixture

SAMPLED: dict[str, Any] = {"prompt": PROMPT, "temperature": 0.9, "seed": 4, "max_tokens": 24}
ENTRY = Entry(
    id="cmpl-1",
    created=7,
    fingerprint="f",
    strategy="autoregressive",
    ended="finished",
    sampling=SamplingParams(
        temperature=1 / 3, stop=("é",), logit_bias={5: 1e-3}, logprobs=True, grammar=Grammar.regex("a+")
    ),
    prompts=(LoggedPrompt((3, 4), 9),),
    answers=(LoggedAnswer((5, 6, 7), (-1 / 3, -0.0, -math.inf), "stop"),),
)


def wait_for(holds: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < SECONDS
        time.sleep(0.01)


@contextmanager
def logging_to(server: Running, path: Path) -> Iterator[RequestLog]:
    """Have the shared server write a log, which is whole at the end."""
    log = RequestLog(path)
    server.served.log = log
    try:
        yield log
        server.until(lambda: server.is_idle)
    finally:
        server.served.log = None
        log.close()


@pytest.fixture
def logged(server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the log of a few requests, and have the command line find the model loaded."""
    path = tmp_path / "log.jsonl"
    with logging_to(server, path):
        server.complete(**{**SAMPLED, "n": 2, "prompt": [PROMPT, "One grey"]}, stop="fo")
        server.events("/v1/completions", **{**SAMPLED, "prompt": "A small", "seed": 1})
        with server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            next(answer.iter_bytes())
    monkeypatch.setattr("jaxinfer.cli.loading.load_model", lambda options: server.lm)
    return path


def test_a_log_is_replayed_with_the_same_bits_and_any_other_bit_is_found(
    logged: Path,
    run: Callable[..., Outcome],  # noqa: F811
) -> None:
    lines = logged.read_text().splitlines()
    entries = {entry.ended: entry for _, entry in read_log(logged, print)}
    assert len(lines) == 3
    assert set(entries) == {"finished", "client_gone"}
    assert all(answer.tokens for answer in entries["client_gone"].answers)
    same = run("replay", logged)
    assert (same.code, same.out) == (
        0,
        "6 of 6 answers are equal in every bit; 1 ended early, compared as far as they went\n",
    )
    entry = json.loads(lines[0])
    answer = entry["answers"][1]
    bits = answer["logprobs"][2]
    answer["logprobs"][2] = math.nextafter(bits, 0.0)
    logged.write_text("\n".join([json.dumps(entry), *lines[1:], ""]))
    other = run("replay", logged)
    assert (other.code, other.err) == (1, "")
    told = other.out.splitlines()
    assert told[0].startswith("5 of 6 ")
    assert told[1].startswith(f"the first difference: request {entry['id']}, choice 1, token 2: ")
    assert f"{bits!r}" in told[1]


@pytest.mark.exhaustive
def test_calls_and_responses_are_replayed_too(
    calls: Running,  # noqa: F811
    run: Callable[..., Outcome],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, asked = tmp_path / "log.jsonl", {**ASKED, "tool_choice": "required", "seed": 1, "max_tokens": 40}
    flat = [{"type": "function", **one["function"]} for one in TOOLS]
    spoken: dict[str, Any] = {"model": MODEL, "input": "hi", "max_output_tokens": 40, "seed": 2, "tools": flat}
    choice = {"tool_choice": {"type": "function", "name": "ox"}, "parallel_tool_calls": False}
    with logging_to(calls, path):
        (answer,) = calls.post("/v1/chat/completions", {**asked, "return_token_ids": True}).json()["choices"]
        calls.events("/v1/chat/completions", **asked)
        response = calls.post("/v1/responses", {**spoken, **choice, "strategy": "off"}).json()
        calls.post("/v1/responses", {**spoken, "stream": True})
    whole, streamed, called, free = [entry for _, entry in read_log(path, print)]
    assert [list(one.ids) for one in whole.prompts] == [answer["prompt_token_ids"]]
    assert [list(one.tokens) for one in whole.answers] == [answer["token_ids"]]
    assert (streamed.answers, streamed.sampling) == (whole.answers, whole.sampling)
    assert whole.sampling.grammar == use(tool_choice="required").grammar
    assert (called.id, response["output"][0]["type"]) == (response["id"], "function_call")
    assert (called.sampling.grammar is None, free.sampling.grammar is None) == (False, True)
    monkeypatch.setattr("jaxinfer.cli.loading.load_model", lambda options: calls.lm)
    same = run("replay", path)
    assert (same.code, same.out) == (0, "4 of 4 answers are equal in every bit\n")


@pytest.mark.parametrize("spoil", ["token", "shorter", "longer", "end"])
def test_every_way_to_differ_is_found(server: Running, spoil: str) -> None:
    from jaxinfer.server.log.replay import difference

    sampling = SamplingParams(temperature=0.9, seed=4, logprobs=True)
    (result,) = server.lm.generate(PROMPT, max_new_tokens=24, sampling=sampling)
    whole = LoggedAnswer(result.tokens, result.logprobs, result.finish_reason)
    assert difference(whole, result) is None
    cut = replace(whole, tokens=whole.tokens[:3], logprobs=whole.logprobs[:3])
    assert difference(replace(cut, finish_reason=None), result) is None
    spoilt = {
        "token": replace(whole, tokens=(whole.tokens[0] ^ 1, *whole.tokens[1:])),
        "shorter": cut,
        "longer": replace(whole, tokens=(*whole.tokens, 5), logprobs=(*whole.logprobs, 0.0)),
        "end": replace(whole, finish_reason={"stop": "length", "length": "stop"}[result.finish_reason]),
    }
    assert difference(spoilt[spoil], result)


def test_texts_are_written_only_where_they_are_asked_for(server: Running, tmp_path: Path) -> None:
    for name in ("ids", "texts"):
        with logging_to(server, tmp_path / name) as log:
            log.decode = server.lm.tokenizer.decode if name == "texts" else None
            text = server.complete(**SAMPLED).json()["choices"][0]["text"]
        line = (tmp_path / name).read_text()
        assert (json.dumps(text) in line, json.dumps(PROMPT) in line) == (name == "texts",) * 2
        assert (tmp_path / name).stat().st_mode & 0o077 == 0


def test_an_answer_that_took_too_long_is_logged_with_its_error(server: Running, tmp_path: Path) -> None:
    with logging_to(server, tmp_path / "log"):
        server.served.options = replace(before := server.served.options, request_seconds=1e-6)
        try:
            assert server.complete(**SAMPLED).status_code == 504
        finally:
            server.served.options = before
    ((_, entry),) = read_log(tmp_path / "log", print)
    assert (entry.ended, entry.answers[0].finish_reason) == ("request_timed_out", None)


def test_an_entry_is_read_as_it_was_written() -> None:
    call = Grammar.sequence([Grammar.choice(["é("]), Grammar.json_object(), Grammar.any_of([Grammar.regex("a|b")])])
    for grammar in (None, ENTRY.sampling.grammar, call, Grammar.repeated(call, Grammar.regex(", "))):
        entry = replace(ENTRY, sampling=replace(ENTRY.sampling, grammar=grammar), adapter=grammar and "poems")
        assert read_entry(write_entry(entry)) == entry
    assert str(read_entry(write_entry(ENTRY)).answers[0].logprobs[1]) == "-0.0"
    assert read_entry(write_entry(ENTRY, str)) == ENTRY


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('{"jaxinfer_log": 1', '{"jaxinfer_log": 2'),
        ('"id"', '"ID"'),
        ('"tokens": [5', '"tokens": ["5"'),
        ('"tokens": [5, ', '"tokens": ['),
        ('"finish_reason": "stop"', '"finish_reason": "tired"'),
        ('"seed": 0', '"seed": -1'),
        ('"kind": "regex"', '"kind": "lark"'),
        ('"prompts": [{', '"prompts": [], "x": [{'),
        ('"created": 7', '"created": true'),
        ('"sampling": {', '"sampling": [{'),
    ],
)
def test_lines_that_are_no_entry_are_named(tmp_path: Path, old: str, new: str) -> None:
    path, line = tmp_path / "log", write_entry(ENTRY).decode()
    assert old in line
    path.write_text(line + line.replace(old, new))
    with pytest.raises(InvalidOption, match="line 2"):
        list(read_log(path, print))


def test_a_line_in_another_encoding_is_named(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(write_entry(ENTRY) + "\ufeffhello\n".encode("utf-16-le"))
    with pytest.raises(InvalidOption, match="line 2: it is not UTF-8"):
        list(read_log(tmp_path / "log", print))


def test_what_a_killed_server_left_is_skipped_and_then_cut_off(tmp_path: Path) -> None:
    path, line, notes = tmp_path / "log", write_entry(ENTRY), list[str]()
    path.write_bytes(line + line[:40])
    assert [number for number, _ in read_log(path, notes.append)] == [1]
    assert len(notes) == 1
    assert "line 2" in notes[0]
    log = RequestLog(path)
    with pytest.raises(InvalidOption, match="another server"):
        open_log(path)
    log.write(ENTRY)
    log.close()
    assert path.read_bytes() == line + line
    path.write_bytes(line[:9])
    os.close(open_log(path))
    assert path.read_bytes() == b""


def test_no_other_file_is_touched(tmp_path: Path) -> None:
    path = tmp_path / "letter"
    path.write_text("Dear reader")
    for wrong in (path, tmp_path, tmp_path / "no" / "folder"):
        with pytest.raises(InvalidOption, match="--log"):
            open_log(wrong)
    assert path.read_text() == "Dear reader"


def test_a_full_disk_is_told_once_and_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings, path, line = list[str](), tmp_path / "log", write_entry(ENTRY)
    room, write = [len(line) + 10], os.write

    def write_some(descriptor: int, data: memoryview) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        written = write(descriptor, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr("jaxinfer.server.log.writer.os.write", write_some)
    log = RequestLog(path, warnings.append)
    for _ in range(3):
        log.write(ENTRY)
    wait_for(log._waiting.empty)
    wait_for(lambda: bool(warnings))
    room[0] = 10**6
    log.write(ENTRY)
    log.close()
    assert path.read_bytes() in (line * 2, line * 3)  # the last of the three may have come after there was room
    (warning,) = warnings
    assert "No space left" in warning


def test_a_disk_that_is_too_slow_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings = list[str]()
    monkeypatch.setattr("jaxinfer.server.log.writer._MOST_WAITING", 2)
    monkeypatch.setattr("jaxinfer.server.log.writer.os.write", lambda descriptor, data: time.sleep(0.2) or len(data))
    log = RequestLog(tmp_path / "log", warnings.append)
    began = time.monotonic()
    for _ in range(20):
        log.write(ENTRY)
    assert time.monotonic() - began < 0.1
    log.close()
    (warning,) = warnings
    assert "too slow" in warning


@pytest.mark.parametrize("content", [None, "", "{}\n", write_entry(ENTRY).decode() * 2 + "x\n"])
def test_mistakes_of_replay_are_one_line(
    run: Callable[..., Outcome],  # noqa: F811
    tmp_path: Path,
    content: str | None,
) -> None:
    path = tmp_path / "log"
    if content is not None:
        path.write_text(content)
    found = run("replay", path)
    assert (found.code, found.out) == (2, "")
    (line,) = found.err.splitlines()
    assert line.startswith(f"error: {path}")


@pytest.mark.parametrize("options", [("--log-text",), ("--log", "/nowhere/log")])
def test_mistakes_of_serve_are_one_line(run: Callable[..., Outcome], options: tuple[str, ...]) -> None:  # noqa: F811
    found = run("serve", "--port", "0", *options)
    (line,) = found.err.splitlines()
    assert (found.code, found.out) == (2, "")
    assert line.startswith("error: --log")


def test_another_model_is_refused(
    run: Callable[..., Outcome],  # noqa: F811
    server: Running,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "log"
    monkeypatch.setattr("jaxinfer.cli.loading.load_model", lambda options: server.lm)
    longer = replace(ENTRY, fingerprint=server.served.system_fingerprint(), prompts=(LoggedPrompt((3,), 5000),))
    for entry, message in ((ENTRY, "was answered by f"), (longer, "may need 5001 tokens")):
        path.write_bytes(write_entry(entry))
        found = run("replay", path)
        assert (found.code, found.out) == (2, "")
        assert message in found.err


@pytest.mark.slow
def test_the_log_of_a_server_that_is_killed_is_replayed(trained_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "log"
    with process(trained_folder, "--log", str(path), "--log-text") as (child, address):
        request = {**SAMPLED, "model": NAME, "structured_outputs": {"regex": "[a-f]{9}"}}
        text = httpx.post(f"{address}/v1/completions", json=request, timeout=SECONDS, verify=False).json()
        wait_for(lambda: path.read_bytes().endswith(b"\n"))
        child.kill()
    assert json.loads(path.read_text())["answers"][0]["text"] == text["choices"][0]["text"]
    with path.open("a") as file:
        file.write('{"jaxinfer_log": 1, "id"')
    command = [sys.executable, "-m", "jaxinfer", "replay", str(path), "--model", str(trained_folder)]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    found = subprocess.run([*command, "--max-len", "200"], env=kept, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "1 of 1 answers are equal in every bit\n")
    assert found.stderr.count("\n") == 1
    assert "skipped" in found.stderr
