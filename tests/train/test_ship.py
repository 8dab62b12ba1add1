"""The drafters in the package are those that the recipe makes, and small enough to come with it."""

import argparse
import json
import os
import re
import signal
import threading

import pytest

from jaxinfer.checkpoint.drafters.shipped import DRAFTERS, FILES
from jaxinfer.model_loading import DEFAULT_MODEL
from train import medusa, prompts, recipe, ship
from train.arguments import identity
from train.data import __main__ as data
from train.eagle import __main__ as eagle
from train.streams import __main__ as streams

COMMANDS = {module.__name__.removesuffix(".__main__"): module for module in (data, eagle, medusa, prompts, streams)}
SHIPPED = {
    "heads": (ship.HEADS, "Hydra heads"),
    "streams": (ship.STREAMS, "streams"),
    "eagle": (ship.EAGLE_MORE, "An EAGLE-3 drafter"),
}


def parse(command, *arguments):
    parser = argparse.ArgumentParser()
    COMMANDS[command].add_arguments(parser)
    return parser.parse_args(list(map(str, arguments)))


def write_drafters(folder, kind, weights):
    folder.mkdir(parents=True)
    description, learned = FILES[kind]
    for name in (description, "tree.json", "tree_64.json"):
        (folder / name).write_text("[[0]]")
    (folder / learned).write_bytes(weights)
    (folder / "README.md").write_text("# A card\n")


def test_every_step_is_a_command_and_all_its_drafters_are_put_into_place(tmp_path, monkeypatch):
    told = []

    def call(command, *arguments):
        told.append(parse(command, *arguments))
        for kind, (recipe_of, _) in SHIPPED.items():
            if command == recipe_of[0]:
                write_drafters(told[-1].out / ("drafter" if kind == "eagle" else kind), kind, b"new")
        if command == "train.prompts":
            assert not told[-1].out.exists()  # it refuses a file that is there
            told[-1].out.write_text("{}\n")
        if command == "train.data":
            answer = {"category": "self-written" if "self" in told[-1].out.name else "math", "tokens": [1, 2, 3]}
            own = {**answer, "prompt_tokens": [len(told)]}
            come_again = {**answer, "category": "chat", "prompt_tokens": [0]}
            told[-1].out.write_text("".join(json.dumps(each) + "\n" for each in (own, come_again)))

    monkeypatch.setattr(ship, "call", call)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "prompts.partial").write_text('{"prompt": "of a run that was killed"}\n')
    place = tmp_path / "drafters"
    write_drafters(place / DEFAULT_MODEL / "heads", "heads", b"old")
    assert ship.run(argparse.Namespace(data=tmp_path, work=tmp_path / "work", to=place)) == 0
    written = {options.out.name for options in told}
    trained = [options for options in told if isinstance(vars(options).get("data"), list)]
    read = {path.name for options in trained for path in options.data}
    first, more = ["answers.jsonl", "self_answers.jsonl"], ["more_answers.jsonl", "task_answers.jsonl"]
    more.append("more_self_answers.jsonl")
    assert read == {*first, *more} <= written
    begun, gone_on = [options for options in trained if "steps" in options and "online" in options]
    assert [path.name for path in begun.data] == first
    assert gone_on.init == begun.out / "drafter"
    assert [path.name for path in gone_on.data] == more
    for kind in SHIPPED:
        folder = place / DEFAULT_MODEL / kind
        assert (folder / FILES[kind][1]).read_bytes() == b"new"
        card = (folder / "README.md").read_text()
        assert card.startswith("# A card\n\n## Data\n")
        num_files = {"streams": 1, "heads": 2, "eagle": 5}[kind]
        assert f"* {3 if num_files == 5 else 1} questions of GSM8K's training set (MIT)\n" in card
        assert (f"* {num_files // 2} that the model wrote itself" in card) == (num_files > 1)
        assert "* 1 tasks and questions of this project's own\n" in card  # which is in every file
        assert f"{num_files + 1} prompts in its chat template: {3 * num_files + 3} tokens" in card


@pytest.mark.parametrize("kind", SHIPPED)
def test_shipped_drafters_say_how_they_were_made(kind, tmp_path):
    command, title = SHIPPED[kind]
    folder = DRAFTERS / DEFAULT_MODEL / kind
    card = (folder / "README.md").read_text()
    (tmp_path / "answers.jsonl").write_text("{}")
    told = identity(parse(*command, "--data", tmp_path / "answers.jsonl", "--out", tmp_path))
    stated = dict(
        line[2:].split(": ", 1) for line in card.partition("## Data")[0].splitlines() if line.startswith("* ")
    )
    given = {part[2:].replace("-", "_") for part in command if part.startswith("--")}
    assert given <= stated.keys()
    told_by_the_run = {"data", "data_digests", *(("init", "share_lm_head") if kind == "eagle" else ())}
    for name in (stated.keys() & told.keys()) - told_by_the_run:
        assert stated[name] == str(told[name]), name
    if kind == "eagle":
        assert re.fullmatch("[0-9a-f]{12}", stated["init"])
        assert stated["share_lm_head"] == "True"
    assert title in card.splitlines()[0]
    assert "\n## Data\n" in card
    assert json.loads((folder / FILES[kind][0]).read_text())["base_fingerprint"] in card


def test_drafters_take_little_of_the_package():
    sizes = {path: path.stat().st_size for path in DRAFTERS.rglob("*") if path.is_file()}
    assert sum(sizes.values()) <= 21e6
    assert max(sizes.values()) <= 12e6


def test_an_interrupted_step_may_end_in_its_own_time_and_a_mistake_is_told(tmp_path, monkeypatch):
    """The step is sent the signal with its parent, and takes longer to save than a parent would usually wait."""
    (tmp_path / "step.py").write_text(STEP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    killer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        recipe.call("step", tmp_path / "saved", 130)
    assert (tmp_path / "saved").read_text() == "all of it"
    with pytest.raises(recipe.StepFailed, match="step ended with exit code 2; the same command goes on"):
        recipe.call("step", tmp_path / "saved", 2)


STEP = """
import sys, time
from pathlib import Path
time.sleep(3 if sys.argv[2] == "130" else 0)
Path(sys.argv[1]).write_text("all of it")
sys.exit(int(sys.argv[2]))
"""
