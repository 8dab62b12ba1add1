"""``two-models``: a draft model with four drafts beside streams: calls of target and draft model, and milliseconds.

Two draft models: the target itself in four bits, which nothing trains, and some of its layers, distilled on its own
answers to the tasks' training prompts.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxinfer.bench.acceptance.tally import Tally
from train.command import number
from train.talks.setup import (
    add_learning_arguments,
    add_measuring_arguments,
    answers,
    measure,
    model_words,
    trained,
)

SUMMARY = "a draft model with four drafts beside streams: calls of both models, and milliseconds"
_PLAIN = "autoregressive"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the table."""
    add_measuring_arguments(parser)
    whole = number(int, 1)
    parser.add_argument("--drafts", metavar="G", type=whole, default=4, help="drafts a step (default: %(default)s)")
    parser.add_argument("--streams", metavar="S", default="streams", help="strategy of the streams (default: streams)")
    parser.add_argument("--bits", metavar="W", default="int4:group=32", help="the target's few bits (%(default)s)")
    parser.add_argument(
        "--student-layers", metavar="N", default="4", help="layers of the distilled model; 0 has none (default: 4)"
    )
    parser.add_argument("--length", metavar="T", type=whole, default=256, help="of its training rows (default: 256)")
    add_learning_arguments(parser, epochs=1.0)


def build(options: argparse.Namespace) -> dict[str, Any]:
    """Distil the draft model, measure all, and return the table."""
    strategies = {
        _PLAIN: ("plain", "plain"),
        options.streams: ("streams", "streams"),
        f"draft_model:model=self,weights={options.bits},num_draft_tokens={options.drafts}": (
            "draft model",
            "itself in 4 bits" if options.bits.startswith("int4") else f"itself in {options.bits}",
        ),
    }
    if options.student_layers != "0":
        spec = f"draft_model:model={distilled(options)},num_draft_tokens={options.drafts}"
        strategies[spec] = "draft model", f"distilled, {options.student_layers} layers"
    # The cost of a step with gamma + 1 nodes is what a verification of the drafts takes.
    nodes = 1 + options.drafts
    measured = measure(options, [spec for spec in strategies if spec != _PLAIN], (1, nodes))
    tasks = []
    for task, found in measured.tasks.items():
        # A table may be kept where the folder of the work is not.
        rows = [row(spec.replace(f"{options.work}/", ""), *of, found[spec]) for spec, of in strategies.items()]
        prompts = found[_PLAIN].prompts
        tasks.append({"task": task, "prompts": prompts, "verify_cost": measured.costs[nodes], "rows": rows})
    learned = {"texts": options.texts, "epochs": options.epochs, "max_new_tokens": options.max_new_tokens}
    return {"model": options.model, "dtype": options.dtype, "drafts": options.drafts, **learned, "tasks": tasks}


def distilled(options: argparse.Namespace) -> Path:
    """Return the folder of the distilled draft model."""
    words = [*model_words(options), "--student-layers", options.student_layers, "--length", options.length]
    words += ["--batch-size", 1, "--learning-rate", 5e-4, "--held-out", 0.03, "--epochs", options.epochs]
    return trained(options, "draft", "draft", "train.distill", *words, "--data", answers(options))


def row(strategy: str, kind: str, name: str, tally: Tally) -> dict[str, Any]:
    """Return a strategy's row: calls and milliseconds are a prompt's, decoding alone."""
    rate = tally.tokens_per_second or 0.0
    return {
        "strategy": strategy,
        "kind": kind,
        "name": name,
        "tokens_per_call": tally.tokens_per_step,
        "target_calls": tally.steps / tally.prompts,
        # A chain is drafted a token a call; trees of streams come out of the target's own pass.
        "draft_calls": tally.drafted / tally.prompts if kind == "draft model" else 0.0,
        "ms": 1e3 * tally.tokens / rate / tally.prompts if rate else 0.0,
        "speed_up": tally.speed_up,
    }


def rows(table: Mapping[str, Any]) -> list[list[str]]:
    """Return the table's titles, and its rows."""
    found = [["task", "drafts by", "target calls", "draft calls", "tokens a call", "ms a prompt", "speed-up"]]
    for task in table["tasks"]:
        for one in task["rows"]:
            calls = [f"{one['target_calls']:.1f}", f"{one['draft_calls']:.1f}", f"{one['tokens_per_call']:.2f}"]
            speed = "" if one["speed_up"] is None else f"{one['speed_up']:.2f}x"
            found.append([task["task"], one["name"], *calls, f"{one['ms']:.0f}", speed])
    return found


def draw(figure: Any, table: Mapping[str, Any]) -> None:
    """Draw milliseconds a prompt by task, with the calls of target and draft model."""
    axes, tasks = figure.subplots(), table["tasks"]
    names = [one["name"] for one in tasks[0]["rows"]]
    width = 0.8 / len(names)
    for at, name in enumerate(names):
        places = [place + (at - (len(names) - 1) / 2) * width for place in range(len(tasks))]
        own = [task["rows"][at] for task in tasks]
        axes.bar(places, [one["ms"] for one in own], width, label=name)
        for place, one in zip(places, own):
            calls = f"{one['target_calls']:.0f}" + (f"+{one['draft_calls']:.0f}" if one["draft_calls"] else "")
            axes.annotate(calls, (place, one["ms"]), ha="center", va="bottom", fontsize="x-small")
    axes.set_xticks(range(len(tasks)), [task["task"] for task in tasks])
    axes.set_ylabel("ms a prompt")
    axes.set_title("calls of the target + calls of the draft model above each bar")
    axes.margins(y=0.1)
    axes.legend()
