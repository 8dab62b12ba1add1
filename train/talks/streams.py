"""``streams``: speculative streaming beside Medusa and plain decoding, and what the number of stream layers changes.

Speed-ups, the ratio by which calls of the target get fewer (its tokens a call), the quality of answers, and extra
parameters: those that are there, and those of the talk's own formulas.
"""

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxinfer.checkpoint.drafters.shipped import DRAFTERS
from jaxinfer.checkpoint.safetensors_file import CODES, SafetensorsFile
from jaxinfer.decoding.registry import parse_strategy
from train.command import number
from train.talks.setup import (
    add_learning_arguments,
    add_measuring_arguments,
    answers,
    measure,
    model_words,
    stored,
    test_prompts,
    trained,
)

SUMMARY = "streams beside Medusa and plain decoding, with an ablation over the layers that have streams"
_PLAIN = "autoregressive"
_MARKS = ("exact", "rouge1", "rougeLsum")


def medusa_parameters(vocab_size: int, model_dim: int, heads: int = 4) -> int:
    """Return the talk's count for Medusa heads that have output matrices of their own: 4 (V D + D^2 + D)."""
    return heads * (vocab_size * model_dim + model_dim**2 + model_dim)


def stream_parameters(model_dim: int) -> int:
    """Return the talk's count for streams: 20 D, their identifiers and the low-rank map that they start from."""
    return 20 * model_dim


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the table."""
    add_measuring_arguments(parser)
    parser.add_argument("--medusa", metavar="S", default="medusa", help="strategy of the heads (default: medusa)")
    parser.add_argument("--streams", metavar="S", default="streams", help="strategy of the streams (default: streams)")
    whole = number(int, 0)
    parser.add_argument(
        "--layers",
        metavar="N",
        type=whole,
        nargs="+",
        default=[1, 2, 4, 8],
        help="stream layers of the ablation; 0: no ablation (default: 1 2 4 8)",
    )
    parser.add_argument("--adapter-rank", metavar="R", type=whole, default=7, help="of streams (default: %(default)s)")
    add_learning_arguments(parser, epochs=2.0)


def build(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the drafters on all tasks, train those of the ablation, and return the table."""
    specs = {"plain": _PLAIN, "Medusa": options.medusa, "streams": options.streams}
    folders = {name: _folder(options.model, specs[name]) for name in ("Medusa", "streams")}
    width, vocab = _sizes(folders["streams"])
    tasks = []
    for task, found in measure(options, [options.medusa, options.streams]).tasks.items():
        rows = [
            {
                "name": name,
                "strategy": spec,
                "speed_up": found[spec].speed_up,
                "call_reduction": found[spec].tokens_per_step,
            }
            for name, spec in specs.items()
        ]
        tasks.append({"task": task, "prompts": options.prompts, "marks": _marks(options, task), "rows": rows})
    parameters = {
        "Medusa": {"own": num_parameters(folders["Medusa"]), "formula": medusa_parameters(vocab, width)},
        "streams": {"own": num_parameters(folders["streams"]), "formula": stream_parameters(width)},
    }
    told = {"model": options.model, "dtype": options.dtype, "max_new_tokens": options.max_new_tokens}
    return {**told, "parameters": parameters, "tasks": tasks, "ablation": _ablation(options)}


def num_parameters(folder: Path) -> int:
    """Return the numbers that drafters on disk hold; scales of codes are none of them."""
    files = [SafetensorsFile(path, CODES) for path in sorted(folder.glob("*.safetensors"))]
    shapes = {name: shape for file in files for name, shape in file.shapes().items()}
    return sum(math.prod(shape) for name, shape in shapes.items() if not name.endswith("_scale"))


def _folder(model: str, spec: str) -> Path:
    """Return the folder that a strategy of drafters reads."""
    strategy: Any = parse_strategy(spec)
    return Path(strategy.heads) if strategy.heads else DRAFTERS / model / strategy.folder_kind


def _sizes(streams: Path) -> tuple[int, int]:
    """Return the width and the vocabulary of the model that streams are for."""
    description = json.loads((streams / "streams.json").read_bytes())
    return description["model_dim"], description["vocab_size"]


def _marks(options: argparse.Namespace, task: str) -> dict[str, float] | None:
    """Return how good answers to a task are, if it has right ones; no drafter of a frozen model changes any."""
    path = test_prompts(options, task)
    if "references" not in json.loads(path.read_text(encoding="utf-8").partition("\n")[0]):
        return None
    words: list[object] = [*model_words(options), "--data", path, "--json"]
    found = stored(options, f"quality_{task}", "train.quality", *words, "--max-new-tokens", options.max_new_tokens)
    overall = json.loads(found.read_bytes())["overall"]
    return {name: overall[name] for name in _MARKS}


def _ablation(options: argparse.Namespace) -> dict[str, Any] | None:
    """Train heads, and streams through each number of layers, on the same answers; return what each gains."""
    layers = [count for count in dict.fromkeys(options.layers) if count]
    if not layers:
        return None
    same: list[object] = [*model_words(options), "--data", answers(options), "--held-out", 0.03]
    heads = ["--heads", 3, "--share-lm-head", "--window", 32, "--batch-size", 8, "--epochs", options.epochs]
    made = {"Medusa": trained(options, "heads", "heads", "train.medusa", *same, *heads)}
    for count in layers:
        words = ["--layers", count, "--adapter-rank", options.adapter_rank, "--rank", 24, "--loss-vocab", 8192]
        words += ["--row-length", 256, "--batch-size", 4, "--positions", 64, "--learning-rate", 5e-3]
        words += ["--epochs", options.epochs]
        made[f"streams, {count}"] = trained(options, f"streams_{count}", "streams", "train.streams", *same, *words)
    specs = {
        name: f"{'medusa' if name == 'Medusa' else 'streams'}:heads={folder},tree=4.2.1"
        for name, folder in made.items()
    }
    rows = [
        {"name": name, "parameters": num_parameters(made[name]), "call_reduction": {}, "speed_up": {}} for name in specs
    ]
    for task, found in measure(options, list(specs.values())).tasks.items():
        for row in rows:
            tally = found[specs[row["name"]]]
            row["call_reduction"][task], row["speed_up"][task] = tally.tokens_per_step, tally.speed_up
    return {"texts": options.texts, "epochs": options.epochs, "tree": "4.2.1", "rows": rows}


def rows(table: Mapping[str, Any]) -> list[list[str]]:
    """Return the table's titles, and its rows."""
    found = [["task", "", "speed-up", "calls fewer", "exact", "ROUGE-1", "ROUGE-LSum", "parameters", "by the formula"]]
    for task in table["tasks"]:
        for one in task["rows"]:
            own = table["parameters"].get(one["name"])
            counts = ["", ""] if own is None else [f"{own['own']:,}", f"{own['formula']:,}"]
            own_marks = task["marks"]
            marks = ["", "", ""] if own_marks is None else [f"{100 * own_marks[mark]:.1f}%" for mark in _MARKS]
            speed = "" if one["speed_up"] is None else f"{one['speed_up']:.2f}x"
            found.append([task["task"], one["name"], speed, f"{one['call_reduction']:.2f}", *marks, *counts])
    for one in (table["ablation"] or {"rows": []})["rows"]:
        for task, ratio in one["call_reduction"].items():
            speed = "" if one["speed_up"][task] is None else f"{one['speed_up'][task]:.2f}x"
            found.append(
                [task, f"ablation: {one['name']}", speed, f"{ratio:.2f}", "", "", "", f"{one['parameters']:,}", ""]
            )
    return found


def draw(figure: Any, table: Mapping[str, Any]) -> None:
    """Draw call reduction and speed-up by task, and the ablation's call reduction by stream layers."""
    ablation = table["ablation"]
    panels = figure.subplots(1, 2 if ablation is None else 3)
    tasks = table["tasks"]
    for axes, key, title in zip(panels, ("call_reduction", "speed_up"), ("tokens a call of the target", "speed-up")):
        names = [one["name"] for one in tasks[0]["rows"]][1:]
        for at, name in enumerate(names):
            values = [task["rows"][at + 1][key] or 0.0 for task in tasks]
            axes.bar([place + (at - 0.5) * 0.4 for place in range(len(tasks))], values, 0.4, label=name)
        axes.axhline(1.0, color="black", linewidth=1)
        axes.set_xticks(range(len(tasks)), [task["task"] for task in tasks])
        axes.set_title(title)
        axes.legend()
    if ablation is not None:
        axes, own = panels[2], ablation["rows"]
        for at, task in enumerate(task["task"] for task in tasks):
            layers = [int(one["name"].partition(", ")[2]) for one in own[1:]]
            axes.plot(layers, [one["call_reduction"][task] for one in own[1:]], "o-", color=f"C{at}", label=task)
            axes.axhline(own[0]["call_reduction"][task], color=f"C{at}", linestyle="--", linewidth=1)
        axes.set_xlabel("layers with streams (dashed: Medusa)")
        axes.set_title("tokens a call, same answers")
        axes.legend()
