"""What all tables are made with: a model, prompts, answers to learn from, and folders."""

import argparse
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxinfer.bench.acceptance.stored import read_report
from jaxinfer.bench.acceptance.tally import Tally
from jaxinfer.errors import InvalidOption
from jaxinfer.model_loading import DEFAULT_MODEL
from train import recipe
from train.command import number
from train.talks.tasks import TASKS, write_test_prompts, write_train_prompts

_DATA = "--data FOLDER, the folder with tasks/wikisql, tasks/e2e_dev.csv and prompts/spec_bench.jsonl"
_ANSWER_TOKENS = 64


def add_measuring_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the folder of data, and how much is measured on the tasks' test prompts."""
    whole = number(int, 1)
    add_data_argument(parser)
    add_model_arguments(parser)
    parser.add_argument(
        "--tasks", metavar="TASK", nargs="+", choices=tuple(TASKS), default=list(TASKS), help=f"of {', '.join(TASKS)}"
    )
    for name, default, text in (
        ("--prompts", 12, "test prompts of each task"),
        ("--max-new-tokens", 64, "for each prompt"),
        ("--repeats", 3, "runs; times are medians"),
    ):
        parser.add_argument(name, metavar="N", type=whole, default=default, help=f"{text} (default: %(default)s)")


def add_data_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--data``."""
    parser.add_argument("--data", metavar="FOLDER", type=Path, help="folder with the public data sets")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--model`` and ``--dtype``."""
    parser.add_argument("--model", metavar="M", default=DEFAULT_MODEL, help="default: %(default)s")
    parser.add_argument("--dtype", metavar="D", default="float32", help="default: %(default)s")


def add_learning_arguments(parser: argparse.ArgumentParser, epochs: float) -> None:
    """Add how much is learned, and from how many of the model's own answers."""
    parser.add_argument(
        "--texts",
        metavar="N",
        type=number(int, 8),
        default=400,
        help="answers of the model to learn from (default: %(default)s)",
    )
    parser.add_argument(
        "--epochs",
        metavar="N",
        type=number(float, 0.001),
        default=epochs,
        help="passes over them (default: %(default)s)",
    )


def data_folder(options: argparse.Namespace) -> Path:
    """Return the folder of ``--data``; raises InvalidOption where none is given."""
    if options.data is None:
        raise InvalidOption(f"this table is made on public data sets: add {_DATA}")
    if not options.data.is_dir():
        raise InvalidOption(f"--data {options.data}: no such folder; give {_DATA}")
    return options.data


def model_words(options: argparse.Namespace) -> list[object]:
    """Return how a command is told the model."""
    return ["--model", options.model, "--dtype", options.dtype]


def stored(options: argparse.Namespace, name: str, command: str, *words: object) -> Path:
    """Return the file of what a command prints; it runs only if it has not run with the same words."""
    path = options.work / f"{name}_{_digest(command, *words)}.json"
    if not path.is_file():
        recipe.call(command, *words, to=path)
    return path


def test_prompts(options: argparse.Namespace, task: str) -> Path:
    """Return the file of a task's test prompts."""
    out = options.work / f"{task}_{options.prompts}.jsonl"
    return write_test_prompts(data_folder(options), task, options.prompts, out)


class Measured(NamedTuple):
    """What strategies gain on each task, by task and strategy; ``costs`` are those of steps by their nodes."""

    tasks: Mapping[str, Mapping[str, Tally]]
    costs: Mapping[int, float]


def measure(options: argparse.Namespace, strategies: Sequence[str], node_counts: Sequence[int] = (1,)) -> Measured:
    """Return what strategies gain on the tasks' test prompts, one at a time, by ``jaxinfer bench acceptance``."""
    tasks = list(dict.fromkeys(options.tasks))
    prompts = options.work / f"{'_'.join(tasks)}_{options.prompts}_prompts.jsonl"
    parts = [test_prompts(options, task).read_text(encoding="utf-8") for task in tasks]
    prompts.write_text("".join(parts), encoding="utf-8")
    words: list[object] = ["bench", "acceptance", *model_words(options), "--prompts", prompts, "--chat", "--batch", 1]
    words += ["--max-new-tokens", options.max_new_tokens, "--repeats", options.repeats]
    words += ["--nodes", ",".join(map(str, node_counts)), "--json", "--strategies", *strategies]
    (batch,) = read_report(stored(options, "acceptance", "jaxinfer", *words)).batches
    found = {
        # Without several categories there are no tallies of them.
        task: {one.strategy: one.categories.get(task, one.overall) for one in batch.strategies}
        for task in tasks
    }
    return Measured(found, batch.costs)


def answers(options: argparse.Namespace) -> Path:
    """Return the file of what the model answers, greedily, to the tasks' training prompts."""
    prompts = options.work / f"train_prompts_{options.texts}.jsonl"
    write_train_prompts(data_folder(options), options.texts, prompts)
    out = options.work / f"answers_{options.texts}.jsonl"
    if not out.is_file():
        partial = out.with_suffix(".partial")
        words = [*model_words(options), "--prompts", prompts, "--out", partial, "--max-new-tokens", _ANSWER_TOKENS]
        recipe.call("train.data", "distill", *words)
        partial.rename(out)
    return out


def trained(options: argparse.Namespace, name: str, part: str, command: str, *words: object) -> Path:
    """Return the folder that a trainer's run has written; it is trained only if it was not with the same words."""
    folder = options.work / f"{name}_{_digest(command, *words)}"
    if not (folder / part).is_dir():
        recipe.call(command, *words, "--out", folder)
    return folder / part


def _digest(*words: object) -> str:
    return hashlib.sha256("\0".join(map(str, words)).encode()).hexdigest()[:8]
