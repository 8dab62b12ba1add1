"""Two processes of two devices each: the tokens of one, and an end in one line where the other is lost."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

import jaxinfer
from jaxinfer import SamplingParams, distributed
from jaxinfer.errors import InvalidOption
from tests.parallel.devices import several
from tests.toy_adapters import edit_adapter, with_magnitudes, write_adapter

PROMPTS = ["One two three one two", "a", "The end of the text, the end of"]
CHANGES = {**several(2), "JAX_ENABLE_COMPILATION_CACHE": "false"}
HEARTBEAT_SECONDS = 10


@pytest.fixture(scope="module")
def folder(tiny_llama_folder):
    return tiny_llama_folder(num_heads=9, num_kv_heads=3, ffn_dim=63, num_layers=1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(command: list[str], port: int, process_id: int) -> subprocess.Popen:
    others = ["--distributed", "--coordinator", f"127.0.0.1:{port}", "--num-processes", "2", "--process-id"]
    return subprocess.Popen(
        [sys.executable, "-m", "jaxinfer", *command, *others, str(process_id), "--heartbeat", str(HEARTBEAT_SECONDS)],
        env={**os.environ, **CHANGES},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.exhaustive
def test_two_processes_write_the_tokens_of_one_and_the_first_alone_speaks(folder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    asked = ["--strategy", "prompt_lookup", "--temperature", "0.8", "--seed", "3", "--max-new-tokens", "16"]
    command = ["generate", "--model", str(folder), "--prompts", str(prompts), "--json", "--logprobs", *asked]
    port = free_port()
    processes = [start([*command, "--mesh", "data=2,tensor=2"], port, index) for index in range(2)]
    said = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert said[1] == ("", "")
    found = [json.loads(line) for line in said[0][0].splitlines()]
    sampling = SamplingParams(temperature=0.8, seed=3, logprobs=True)
    expected = jaxinfer.load(folder, dtype="float32").generate(PROMPTS, max_new_tokens=16, sampling=sampling)
    assert [one["tokens"] for one in found] == [list(result.tokens) for result in expected]
    for one, result in zip(found, expected):
        assert one["logprobs"] == pytest.approx(result.logprobs, abs=1e-4)


ENGINES = """
import json, sys
import jaxinfer
from jaxinfer import SamplingParams, distributed
from jaxinfer.errors import EngineError
folder, coordinator, process_id, prompts = sys.argv[1:]
distributed.initialize(coordinator, 2, int(process_id))
sampling = SamplingParams(temperature=0.8, seed=3)

def serve(engine, prompts, count):
    requests = [engine.submit(prompt, max_new_tokens=count, sampling=sampling) for prompt in prompts]
    return [request.result().tokens for request in requests]

lm = jaxinfer.load(folder, dtype="float32", mesh="tensor=4")
led = refused = preemptions = None
with lm.engine(max_rows=2, pages=8, page_size=8) as engine:
    if engine.leads:
        led, preemptions = serve(engine, json.loads(prompts), 24), engine.metrics().preemptions
    else:
        try:
            engine.submit("a")
        except EngineError as error:
            refused = str(error)
lm = jaxinfer.load(folder, dtype="float32", mesh="data=2,tensor=2")
with lm.engine(max_rows=2, pages=20, page_size=16) as engine:
    own = serve(engine, json.loads(prompts), 8)
print(json.dumps({"led": led, "refused": refused, "preemptions": preemptions, "own": own}))
"""


@pytest.mark.exhaustive
def test_processes_share_an_engine_or_each_has_one_on_its_own_groups_of_devices(folder):
    """The first process leads where they share one; else process 1 serves one prompt more, and nobody waits for it."""
    given, address = [PROMPTS[:2], PROMPTS], f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ENGINES, str(folder), address, str(index), json.dumps(prompts)],
            env={**os.environ, **CHANGES},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index, prompts in enumerate(given)
    ]
    said = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    sampling = SamplingParams(temperature=0.8, seed=3)
    results = jaxinfer.load(folder, dtype="float32").generate(PROMPTS, max_new_tokens=24, sampling=sampling)
    expected = [list(result.tokens) for result in results]
    # Before it, JAX's own lines about who is connected.
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in said)
    assert first["led"] == expected[:2]
    assert [*first["own"], *second["own"]] == [tokens[:8] for tokens in (*expected[:2], *expected)]
    # Its pages hold little more than one text: what made room was kept in parts.
    assert first["preemptions"] > 0
    assert "submit them there" in second["refused"]


@pytest.mark.slow
def test_a_server_of_two_processes_answers_and_ends_both(folder):
    port = free_port()
    options = ["--model", str(folder), "--mesh", "tensor=4", "--port", "0", "--max-rows", "1", "--pages", "40"]
    processes = [start(["serve", *options, "--name", "toy"], port, index) for index in range(2)]
    stderr = processes[0].stderr
    assert stderr is not None
    try:
        address = next(line.split()[-1] for line in iter(stderr.readline, "") if line.startswith("toy on "))
        body = {"model": "toy", "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0}
        answer, refused = (
            post(f"{address}/v1/{path}", given)
            for path, given in (
                ("completions", {**body, "return_token_ids": True}),
                ("embeddings", {"model": "toy", "input": "a"}),
            )
        )
        processes[0].terminate()
        assert [process.wait(120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    (expected,) = jaxinfer.load(folder, dtype="float32").generate([PROMPTS[0]], max_new_tokens=8)
    assert answer["choices"][0]["token_ids"] == list(expected.tokens)
    assert "several processes" in refused["error"]["message"]


def post(url, body):
    """Return a server's answer to a request, an error's too."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.load(error)


@pytest.mark.parametrize(
    "lost", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.exhaustive)]
)
def test_a_process_that_is_killed_ends_the_other_in_the_stated_time(folder, lost):
    port = free_port()
    command = ["generate", "a b c", "--model", str(folder), "--mesh", "tensor=4", "--temperature", "1"]
    command += ["--max-new-tokens", "100000", "--ignore-eos", "--max-len", "100100", "--cache", "streaming:window=60"]
    processes = [start(command, port, index) for index in range(2)]
    first, other = processes[0], processes[1 - lost]
    try:
        assert first.stdout is not None
        assert first.stdout.read(1)  # the text has begun
        processes[lost].kill()
        killed = time.monotonic()
        # Beside the heartbeat: JAX looks for silent processes now and then, and a busy machine takes its time.
        _, complaint = other.communicate(timeout=HEARTBEAT_SECONDS + 60)
        assert time.monotonic() - killed < HEARTBEAT_SECONDS + 30
        assert other.returncode != 0
        assert "another process of this run" in complaint or "another task died" in complaint
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for pipe in filter(None, (process.stdout, process.stderr)):
                pipe.close()


@pytest.mark.slow
def test_a_mistake_on_one_process_ends_both(folder, tmp_path):
    """Its own with one line and exit code 2, not after a wait for the other, which is in a collective or before one."""
    port = free_port()
    command = ["generate", "a b c", "--mesh", "tensor=4", "--max-new-tokens", "4", "--model"]
    processes = [start([*command, str(model)], port, index) for index, model in enumerate((folder, tmp_path / "none"))]
    began = time.monotonic()
    _, complaint = processes[1].communicate(timeout=120)
    assert processes[1].returncode == 2, complaint
    assert complaint.startswith("error: ")
    assert complaint.count("\n") == 1
    processes[0].communicate(timeout=HEARTBEAT_SECONDS + 90)
    assert processes[0].returncode != 0
    assert time.monotonic() - began < HEARTBEAT_SECONDS + 90


@pytest.mark.parametrize(
    "process_id", [pytest.param(0, marks=pytest.mark.exhaustive), pytest.param(1, marks=pytest.mark.slow)]
)
def test_processes_that_do_not_answer_are_waited_for_as_long_as_stated(folder, process_id):
    command = ["generate", "a", "--model", str(folder), "--mesh", "tensor=4", "--join-timeout", "4"]
    began = time.monotonic()
    process = start(command, free_port(), process_id)
    said, complaint = process.communicate(timeout=120)
    assert process.returncode == 2
    assert said == ""
    assert complaint.startswith("error: the coordinator 127.0.0.1:")
    assert "did not answer within 4 s" in complaint
    assert complaint.count("\n") == 1
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("nowhere", 2, 0), "'nowhere' is no address"),
        (("127.0.0.1:1", 2, 2), "process_id=2 is not between 0 and 1"),
        (("127.0.0.1:1", 0, None), "at least one process"),
        (("127.0.0.1:99999", 2, 0), "'127.0.0.1:99999' is no address"),
    ],
)
def test_mistakes_are_named(arguments, complaint):
    with pytest.raises(InvalidOption, match=complaint):
        distributed.initialize(*arguments)


def test_what_jax_refuses_is_said_in_one_line():
    refused = {
        "d.initialize()": "nothing in the environment",
        "d.initialize('127.0.0.1:1')": "give the number of processes and this one's id",
        "jax.devices(); d.initialize()": "call initialize() earlier",
    }
    code = "import jax, jaxinfer.distributed as d, jaxinfer.errors as e\n"
    for call in refused:
        code += f"try: {call}\nexcept e.JaxinferError as error: print(str(error))\n"
    child = subprocess.run([sys.executable, "-c", code], env={**os.environ, **CHANGES}, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    for line, complaint in zip(child.stdout.splitlines(), refused.values(), strict=True):
        assert complaint in line


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["a", "--distributed"], "add --mesh"),
        (["a", "--process-id", "1"], "add it"),
        (["--prompts", "-", "--distributed", "--mesh", "tensor=4"], "standard input reaches one process only"),
    ],
)
def test_options_that_contradict_each_other_are_named(options, complaint, capsys):
    from jaxinfer.cli.main import main

    assert main(["generate", *options]) == 2
    assert complaint in capsys.readouterr().err


ADAPTERS = """
import sys
import jaxinfer
from jaxinfer import distributed
from jaxinfer.errors import InvalidOption
folder, coordinator, process_id, adapter = sys.argv[1:]
distributed.initialize(coordinator, 2, int(process_id))
lm = jaxinfer.load(folder, dtype="float32", mesh="tensor=4")
lm.load_adapter("dora", adapter)
(found,) = lm.generate(["a b c"], max_new_tokens=8, adapter="dora")
try:
    lm.merge_adapter("dora")
except InvalidOption as error:
    print(list(found.tokens), error)
"""


@pytest.mark.exhaustive
def test_an_adapter_that_reads_the_model_is_loaded_by_all_processes(folder, tmp_path):
    lm, address = jaxinfer.load(folder, dtype="float32"), f"127.0.0.1:{free_port()}"
    written = edit_adapter(write_adapter(tmp_path, lm.config, only=("attention.output", "mlp.up")), with_magnitudes)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ADAPTERS, str(folder), address, str(index), str(written)],
            env={**os.environ, **CHANGES},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    said = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    lm.load_adapter("dora", written)
    (expected,) = lm.generate(["a b c"], max_new_tokens=8, adapter="dora")
    for out, _ in said:
        assert out.splitlines()[-1].startswith(f"{list(expected.tokens)} merge_adapter: this process holds only a part")
