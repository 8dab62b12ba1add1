"""``jaxinfer convert`` from outside: what it writes and prints, and what a kill, a full disk or a mistake leaves."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxinfer
from jaxinfer import model_loading, model_quantization
from jaxinfer.checkpoint import new_folder
from jaxinfer.checkpoint.orbax import writer as orbax_writer
from jaxinfer.cli import arguments
from jaxinfer.cli.commands import convert as convert_command
from jaxinfer.errors import InvalidOption
from jaxinfer.model_quantization import MAGNITUDE
from jaxinfer.quantization.methods import METHODS
from tests.cli.test_mistakes import assert_mistake
from tests.cli.test_process import ROOT, child
from tests.default_model import default_model_path


@pytest.fixture(scope="module")
def source(tiny_llama_folder):
    return tiny_llama_folder()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "home")


@pytest.mark.slow
def test_a_converted_model_answers_as_its_source_does(run, source, tmp_path):
    target = tmp_path / "made"
    outcome = run("convert", source, target)
    assert (outcome.code, outcome.out, outcome.err) == (0, "", f"wrote {target}\n")
    command = ["generate", "--chat", "The quick", "--max-new-tokens", "8", "--json", "--dtype", "float32"]
    expected, found = (json.loads(run(*command, "--model", model).out) for model in (source, target))
    assert found["tokens"] == expected["tokens"]
    assert found["text"] == expected["text"]


def test_the_first_layers_are_written_as_a_model_of_their_own(run, tiny_llama_folder, tmp_path):
    folder = tiny_llama_folder(num_layers=5)
    assert_mistake(run("convert", folder, tmp_path / "made", "--layers", "6"), "layers 6: the model has 5 layers")
    assert run("convert", folder, tmp_path / "made", "--layers", "2").code == 0
    assert jaxinfer.load(tmp_path / "made").config.num_layers == 2


@pytest.mark.slow
def test_the_first_layers_answer_as_they_do_when_they_are_written(run, tiny_llama_folder, tmp_path):
    folder = tiny_llama_folder(num_layers=5)
    assert run("convert", folder, tmp_path / "made", "--layers", "2").code == 0
    command = ["generate", "The", "--max-new-tokens", "4", "--json", "--dtype", "float32"]
    found = run(*command, "--model", folder, "--layers", "2").out
    assert found.split('"stats"')[0] == run(*command, "--model", tmp_path / "made").out.split('"stats"')[0]


@pytest.mark.exhaustive
@pytest.mark.optimised
def test_the_default_model_keeps_its_chat_template_and_its_answer(tmp_path):
    """Convert the real GGUF, whose template and vocabulary are in its metadata, and ask what it knows."""
    path = default_model_path()
    done = subprocess.run(
        **child(tmp_path, "-m", "jaxinfer", "convert", str(path), str(tmp_path / "made")), check=False
    )
    assert (done.returncode, done.stdout) == (0, b"")
    assert b"211 quantised tensors become float32" in done.stderr
    expected, found = (jaxinfer.load(model, dtype="float32", max_len=512) for model in (path, tmp_path / "made"))
    assert jax.tree.all(jax.tree.map(np.array_equal, expected.params, found.params))
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    assert found.encode_chat(messages) == expected.encode_chat(messages)
    assert found.eos_token_ids == expected.eos_token_ids
    assert "Paris" in found.chat(messages, max_new_tokens=10).text


@pytest.mark.parametrize("method", ["rtn", pytest.param("gptq", marks=pytest.mark.exhaustive)])
def test_a_model_in_few_bits_is_written_and_loads_so(run, source, tmp_path, method):
    text = tmp_path / "text"
    text.write_text("The fox went to the river and said nothing. " * 40)
    calibration = [] if method == "rtn" else ["--calibration", text]
    outcome = run("convert", source, tmp_path / "made", "--weights", "int4:group=32", "--method", method, *calibration)
    assert (outcome.code, outcome.out, outcome.err) == (0, "", f"wrote {tmp_path / 'made'}\n")
    assert names(tmp_path) == ["made", "text"]
    lm = jaxinfer.load(tmp_path / "made")
    rounded = jaxinfer.load(source, weights="int4:group=32")
    assert jax.tree.structure(lm.params) == jax.tree.structure(rounded.params)
    assert jax.tree.all(jax.tree.map(np.array_equal, lm.params, rounded.params)) == (method == "rtn")
    again = run("convert", tmp_path / "made", tmp_path / "again", "--weights", "int8", "--method", "gptq")
    assert_mistake(again, f"{tmp_path / 'made'}: its weights are in few bits already: quantize the original")
    assert names(tmp_path) == ["made", "text"]


METHOD = ("--weights", "int4:group=32", "--method", "gptq")


def test_a_second_conversion_is_refused_before_it_works(run, source, tmp_path, monkeypatch):
    target = tmp_path / "made"
    monkeypatch.setattr(model_loading, "load", lambda *given, **options: pytest.fail("loaded"))
    with new_folder.claimed(target):
        assert_mistake(run("convert", source, target, *METHOD), f"{target}: another process is writing it")
    assert names(tmp_path) == []


def test_what_is_kept_is_removed_before_another_may_begin(run, source, tmp_path, monkeypatch):
    """The layers are there while the model is written, and nobody else begins meanwhile."""
    target, steps = tmp_path / "made", []

    def quantize(model, weights, *, kept, wrote, advance, **options):
        kept.mkdir()
        with pytest.raises(InvalidOption, match="another process is writing it"), new_folder.claimed(target):
            pass
        for count in range(16, model_quantization.NUM_TEXTS + 1, model_quantization.TEXTS_TOGETHER):
            wrote(count)
        for layer in range(model.config.num_layers):
            advance(layer)
        return model

    @contextlib.contextmanager
    def counted(label, total):
        steps.append(total)
        yield steps.append

    monkeypatch.setattr(model_quantization, "quantize", quantize)
    monkeypatch.setattr(convert_command, "count_progress", counted)
    assert run("convert", source, target, *METHOD).code == 0
    assert names(tmp_path) == ["made"]
    # A step of the bar for all that is done, also for texts.
    assert steps == [10, *(f"{count} texts" for count in range(16, 129, 16)), "layer 0", "layer 1"]


@pytest.mark.parametrize(
    ("free", "is_there"),
    [(1 << 30, True), pytest.param(20 << 20, False, id="only in its place"), pytest.param(1 << 20, True, id="nowhere")],
)
def test_layers_make_room_for_the_model_where_both_do_not_fit(tmp_path, monkeypatch, free, is_there):
    kept = tmp_path / "layers"
    kept.mkdir()
    (kept / "layer_0").write_bytes(bytes(8 << 20))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    convert_command._make_room(kept, SimpleNamespace(params={"kernel": np.zeros(8 << 20, np.uint8)}))
    assert kept.exists() == is_there


def test_sparse_weights_that_no_text_chose_are_written(run, source, tmp_path):
    outcome = run("convert", source, tmp_path / "made", "--weights", "2:4", "--method", "magnitude")
    assert (outcome.code, outcome.err) == (0, f"wrote {tmp_path / 'made'}\n")
    assert names(tmp_path) == ["made"]


def test_methods_are_those_that_there_are():
    assert ("rtn", *METHODS, MAGNITUDE) == arguments.METHODS


MISTAKES = {
    "no destination": (["convert", "SRC"], ["DST"]),
    "no source": (["convert", "/no/such/model", "DST"], ["/no/such/model", "no such file"]),
    "unknown dtype": (["convert", "SRC", "DST", "--dtype", "int3"], ["int3", "bfloat16"]),
    "no parent": (["convert", "SRC", "DST/deeper/still"], ["no such folder; create it first"]),
    "a file": (["convert", "SRC", "FILE", "--overwrite"], ["not a folder"]),
    "not empty": (["convert", "SRC", "FULL"], ["not empty", "--overwrite"]),
    "not ours": (["convert", "SRC", "FULL", "--overwrite"], ["jaxinfer.json", "not overwritten"]),
    "a method without weights": (["convert", "SRC", "DST", "--method", "gptq"], ["give --weights too"]),
    "unknown weights": (["convert", "SRC", "DST", "--weights", "int3"], ["unknown weights 'int3'"]),
    "a form without codes to choose": (
        ["convert", "SRC", "DST", "--weights", "fp8", "--method", "awq"],
        ["'fp8': a method needs int8 or int4"],
    ),
    "a text that is not read": (
        ["convert", "SRC", "DST", "--weights", "int8", "--calibration", "FILE"],
        ["is for --method gptq, awq or sparsegpt"],
    ),
    "too short a text": (
        ["convert", "SRC", "DST", "--weights", "int8", "--method", "awq", "--calibration", "FILE"],
        ["has 4 tokens, but a piece has"],
    ),
    "another option": (["convert", "SRC", "DST", "--shards", "2"], ["--shards"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_all_as_it_was(run, source, tmp_path, mistake):
    place = tmp_path / "place"
    (place / "FULL").mkdir(parents=True)
    (place / "FULL" / "mine").write_text("mine")
    (place / "FILE").write_text("mine")
    arguments, named = MISTAKES[mistake]
    places = {"SRC": str(source)} | {name: str(place / name) for name in ("DST", "FILE", "FULL", "DST/deeper/still")}
    assert_mistake(run(*(places.get(argument, argument) for argument in arguments)), *named)
    assert names(place) == ["FILE", "FULL"]
    assert names(place / "FULL") == ["mine"]


def test_overwriting_replaces_what_convert_wrote_and_never_the_source(run, source, tmp_path):
    target = tmp_path / "made"
    assert run("convert", source, target).code == 0
    assert_mistake(run("convert", source, target), "not empty")
    assert run("convert", source, target, "--overwrite", "--dtype", "float16").code == 0
    tensors = json.loads((target / "jaxinfer.json").read_text())["tensors"]
    assert {tensor["dtype"] for tensor in tensors.values()} == {"float16"}
    assert_mistake(run("convert", target, target, "--overwrite"), "holds the model")
    assert names(tmp_path) == ["made"]
    jaxinfer.load(target)


# Ends itself by SIGKILL when the first or the last byte is written, or before the folder gets its name.
KILLED = """
import contextlib, os, signal, sys
from jaxinfer.checkpoint import new_folder
from jaxinfer.cli import main
from jaxinfer.cli.commands import convert

moment = sys.argv[3]
strike = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)

@contextlib.contextmanager
def watched(label):
    yield lambda done, total: strike() if (done == total) == (moment == "last") else None

if moment == "before":
    new_folder._publish = strike
else:
    convert.byte_progress = watched
sys.exit(main.main(["convert", *sys.argv[1:3], "--overwrite"]))
"""


def kill_conversion(home: Path, source: Path, target: Path, moment: str) -> None:
    done = subprocess.run(**child(home, "-c", KILLED, str(source), str(target), moment), check=False)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "moment", ["last", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("first", "before"))]
)
def test_a_killed_conversion_leaves_nothing_that_loads_and_the_next_clears_it(run, source, tmp_path, moment):
    target = tmp_path / "made"
    kill_conversion(tmp_path / "home", source, target, moment)
    assert names(tmp_path) == [".made.partial"]
    assert_mistake(run("generate", "x", "--model", target), str(target))
    assert run("convert", source, target).code == 0
    assert names(tmp_path) == ["made"]


@pytest.mark.slow
def test_a_killed_conversion_leaves_the_model_that_it_was_to_replace(run, source, tmp_path):
    target = tmp_path / "made"
    assert run("convert", source, target).code == 0
    before = (target / "jaxinfer.json").read_bytes()
    kill_conversion(tmp_path / "home", source, target, "before")
    assert (target / "jaxinfer.json").read_bytes() == before
    jaxinfer.load(target)


@pytest.mark.parametrize("moment", ["first", "before"])
def test_an_interrupted_conversion_clears_up_and_ends_as_other_commands_do(run, source, tmp_path, monkeypatch, moment):
    def strike(*arguments):
        os.kill(os.getpid(), signal.SIGINT)

    @contextlib.contextmanager
    def watched(label):
        yield lambda done, total: strike() if done < total else None

    if moment == "before":
        monkeypatch.setattr(new_folder, "_publish", strike)
    else:
        monkeypatch.setattr(convert_command, "byte_progress", watched)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        outcome = run("convert", source, tmp_path / "made")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "\n")
    assert names(tmp_path) == []


LIMITED = """
import resource, sys
from jaxinfer.cli.main import main

resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
sys.exit(main(["convert", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_a_disk_that_is_full_is_one_line_and_nothing_stays(source, tmp_path):
    """The kernel refuses to let any file grow past 20 kB, which TensorStore sees as it would see a full disk."""
    target = tmp_path / "made"
    done = subprocess.run(**child(tmp_path / "home", "-c", LIMITED, str(source), str(target)), check=False)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.decode() == (
        f"error: {target}: File too large; free some space or give another destination\n"
    )  # fmt: skip
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        ValueError('RESOURCE_EXHAUSTED: Error writing "d/1f": [OS error 28: No space left on device] [line 4]'),
        RuntimeError("Disk quota exceeded"),
    ],
)
def test_all_ways_to_say_that_the_disk_is_full_are_understood(run, source, tmp_path, monkeypatch, error):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(orbax_writer, "write_tensors", fail)
    assert_mistake(run("convert", source, tmp_path / "made"), str(tmp_path / "made"), "free some space")
    assert names(tmp_path) == []


def test_a_file_that_cannot_be_copied_is_named(run, source, tmp_path, monkeypatch):
    def fail(path, place):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "copyfile", fail)
    assert_mistake(run("convert", source, tmp_path / "made"), f"{source}/tokenizer.json: Permission denied")
    assert names(tmp_path) == []


WATCH = """
import sys, threading, time
from pathlib import Path
from jaxinfer.checkpoint.convert import convert

def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def watch():
    while not done.is_set():
        peak[0] = max(peak[0], anonymous_bytes())
        time.sleep(0.002)

done, peak = threading.Event(), [0]
thread = threading.Thread(target=watch)
thread.start()
convert(sys.argv[1], sys.argv[2], dtype="float32")
done.set()
thread.join()
print(peak[0])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="anonymous memory is read from Linux's /proc")
def test_peak_anonymous_memory_is_that_of_a_few_tensors(source, tmp_path):
    """Convert 400 MB of float32 parameters, of which the largest tensor is 67 MB and a group as much."""
    config = json.loads((source / "config.json").read_text())
    layers, wide = 8, {"vocab_size": 16384, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 8}
    config |= wide | {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (16384, 1024), "model.norm.weight": (1024,)}
    for layer in range(layers):
        block = f"model.layers.{layer}"
        shapes |= {f"{block}.{name}_layernorm.weight": (1024,) for name in ("input", "post_attention")}
        shapes |= {f"{block}.self_attn.{name}_proj.weight": (1024, 1024) for name in "qkvo"}
        shapes |= {f"{block}.mlp.{name}_proj.weight": (2048, 1024) for name in ("gate", "up")}
        shapes |= {f"{block}.mlp.down_proj.weight": (1024, 2048)}
    save_file({name: np.ones(shape, np.float16) for name, shape in shapes.items()}, folder / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", WATCH, str(folder), str(tmp_path / "made")],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    num_bytes = 4 * sum(int(np.prod(shape)) for shape in shapes.values())
    assert 4e8 < num_bytes < 4.1e8
    # The interpreter with JAX and Orbax takes 130 MB of this; the whole model would not fit.
    assert int(done.stdout) <= 300e6
