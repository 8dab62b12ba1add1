"""``distil``: a student's curve by divergence and by the share of texts that it writes itself, and filtered data.

The teacher writes texts at temperature 1 after openings of stories, and students of some of its layers learn from them.
All are judged on other texts of the teacher: how likely it accepts their drafts, and how far they are from it.
Filtered data are the half that the teacher finds likeliest, the half that passes checks best, and, beside them, the
first half; students take as many steps on each as on all.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxinfer.model_loading import load
from jaxinfer.models.decoder import Decoder
from jaxinfer.ops.backend import choose_backend
from train import recipe
from train.command import number
from train.data.best_answers import WAYS
from train.distill.divergences import DIVERGENCES
from train.distill.evaluation import DraftEvaluation
from train.loop.fit import METRICS, read_metrics
from train.talks.setup import add_data_argument, data_folder, trained
from train.texts.examples import read_examples
from train.texts.packing import pack
from train.texts.records import RecordWriter, read_records

SUMMARY = "a student's curve by divergence, by on-policy share, and on filtered data"
_OPENINGS = ("Once upon a time", "One day", "There was a", "A little girl", "Tom and Lily", "In the garden", "The dog")
# Texts to judge by are drawn with seeds from here on.
_JUDGED_SEED = 1_000_000
_FILTERED = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the table."""
    whole, share = number(int, 1), number(float, 0, 1)
    add_data_argument(parser)
    parser.add_argument("--model", metavar="M", help="the teacher (default: DATA/models/stories260K-hf)")
    parser.add_argument("--student-layers", metavar="N", default="2", help="of the teacher's (default: %(default)s)")
    parser.add_argument("--texts", metavar="N", type=number(int, 16), default=512, help="default: %(default)s")
    parser.add_argument("--max-new-tokens", metavar="N", type=whole, default=96, help="default: %(default)s")
    parser.add_argument("--length", metavar="T", type=whole, default=128, help="of a row (default: %(default)s)")
    parser.add_argument("--epochs", metavar="N", type=number(float, 0.001), default=4.0, help="default: %(default)s")
    parser.add_argument("--eval-every", metavar="N", type=whole, default=40, help="steps (default: %(default)s)")
    parser.add_argument(
        "--divergences",
        metavar="D",
        nargs="+",
        choices=tuple(DIVERGENCES),
        default=list(DIVERGENCES),
        help=f"of {', '.join(DIVERGENCES)}",
    )
    parser.add_argument(
        "--on-policy", metavar="P", type=share, nargs="+", default=[0.0, 0.5, 1.0], help="default: 0 0.5 1"
    )


def build(options: argparse.Namespace) -> dict[str, Any]:
    """Distil all students, and return the table."""
    teacher = options.model or str(data_folder(options) / "models" / "stories260K-hf")
    learned = _write_texts(options, teacher, "learned", options.texts, 0)
    judged = _write_texts(options, teacher, "judged", max(8, options.texts // 8), _JUDGED_SEED)
    judge = Judge(teacher, judged, options.length)
    rows = []
    for divergence in dict.fromkeys(options.divergences):
        for share in dict.fromkeys(options.on_policy):
            more = ["--on-policy", share, "--samples", 64, "--max-new-tokens", options.max_new_tokens] if share else []
            student = _train(options, teacher, learned, divergence, options.epochs, more)
            rows.append({"divergence": divergence, "on_policy": share, "data": "all", **judge(student)})
    for name in ("first", *WAYS):
        part = _filter(options, teacher, learned, name)
        student = _train(options, teacher, part, "forward_kl", options.epochs / _FILTERED, [])
        rows.append({"divergence": "forward_kl", "on_policy": 0.0, "data": f"half by {name}", **judge(student)})
    told = {"teacher": Path(teacher).name, "student_layers": options.student_layers, "texts": options.texts}
    return {**told, "epochs": options.epochs, "rows": rows}


class Judge:
    """Judges students on the same texts of their teacher."""

    def __init__(self, teacher: str, judged: Path, length: int) -> None:
        self.teacher = load(teacher, dtype="float32", scan_layers=True)
        examples = read_examples(judged, self.teacher.tokenizer, length)
        self.rows = pack(examples, length, 0)

    def __call__(self, student: Path) -> dict[str, Any]:
        """Return a student's figures, and its curve: acceptance by step, on texts held out from its own data."""
        lm = load(str(student), dtype="float32", scan_layers=True)
        decoder = Decoder(lm.config, choose_backend("float32", scan_layers=True))
        teacher = self.teacher
        found = DraftEvaluation(teacher.programs.decoder, decoder, teacher.params, self.rows).measure(lm.params)
        lines = [line for line in read_metrics(student.parent / METRICS) if "evaluation" in line]
        curve = [[line["step"], line["evaluation"]["acceptance"]] for line in lines]
        figures = {"acceptance": found.acceptance, "agreement": found.agreement, "nats": found.divergence}
        return {**figures, "curve": curve}


def _write_texts(options: argparse.Namespace, teacher: str, name: str, count: int, seed: int) -> Path:
    """Have the teacher write texts, unless they are there."""
    prompts, out = (options.work / f"{kind}_{count}.jsonl" for kind in (f"{name}_openings", name))
    if not out.is_file():
        prompts.unlink(missing_ok=True)
        with RecordWriter(prompts) as writer:
            writer.append([{"prompt": _OPENINGS[at % len(_OPENINGS)]} for at in range(count)])
        partial = out.with_suffix(".partial")
        words = ["--model", teacher, "--dtype", "float32", "--raw", "--prompts", prompts, "--out", partial]
        words += ["--temperature", 1, "--seed", seed, "--max-new-tokens", options.max_new_tokens]
        recipe.call("train.data", "distill", *words)
        partial.rename(out)
    return out


def _filter(options: argparse.Namespace, teacher: str, learned: Path, name: str) -> Path:
    """Write the half of the texts that a way to filter keeps, or the first one, unless it is there."""
    out = learned.with_name(f"{learned.stem}_{name}.jsonl")
    if out.is_file():
        return out
    partial = out.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    if name == "first":
        records = read_records(learned)
        with RecordWriter(partial) as writer:
            writer.append([record.fields for record in records[: round(_FILTERED * len(records))]])
    else:
        words = ["--data", learned, "--share", _FILTERED, "--by", name, "--model", teacher, "--dtype", "float32"]
        recipe.call("train.data", "best", *words, "--out", partial)
    partial.rename(out)
    return out


def _train(
    options: argparse.Namespace, teacher: str, data: Path, divergence: str, epochs: float, more: list[Any]
) -> Path:
    words = ["--model", teacher, "--dtype", "float32", "--student-layers", options.student_layers, "--data", data]
    words += ["--length", options.length, "--divergence", divergence, "--epochs", epochs, "--batch-size", 8]
    words += ["--learning-rate", 2e-3, "--eval-every", options.eval_every, "--held-out", 0.1, *more]
    return trained(options, f"student_{divergence}", "draft", "train.distill", *words)


def rows(table: Mapping[str, Any]) -> list[list[str]]:
    """Return the table's titles, and its rows."""
    found = [["divergence", "data", "on policy", "acceptance", "same best token", "KL"]]
    for one in table["rows"]:
        shares = [f"{one['on_policy']:.0%}", f"{one['acceptance']:.1%}", f"{one['agreement']:.1%}"]
        found.append([one["divergence"], one["data"], *shares, f"{one['nats']:.3f}"])
    return found


def draw(figure: Any, table: Mapping[str, Any]) -> None:
    """Draw the curves of the students that learned from all texts, and what filtering changes in the end."""
    axes, bars = figure.subplots(1, 2, width_ratios=[3, 2])
    shares = sorted({one["on_policy"] for one in table["rows"]})
    styles = dict(zip(shares, ("-", "--", ":", "-.")))
    divergences = list(dict.fromkeys(one["divergence"] for one in table["rows"]))
    for one in table["rows"]:
        if one["data"] == "all" and one["curve"]:
            color = f"C{divergences.index(one['divergence'])}"
            label = f"{one['divergence']}, {one['on_policy']:.0%} own"
            axes.plot(*zip(*one["curve"]), styles.get(one["on_policy"], "-"), color=color, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("acceptance on held-out texts")
    axes.legend(fontsize="x-small")
    own = [one for one in table["rows"] if (one["divergence"], one["on_policy"]) == ("forward_kl", 0)]
    bars.bar(range(len(own)), [one["acceptance"] for one in own])
    bars.set_xticks(range(len(own)), [one["data"].replace(" by ", "\nby ") for one in own], fontsize="small")
    bars.set_ylim(bottom=0.9 * min((one["acceptance"] for one in own), default=0))
    bars.set_title("acceptance by data, forward KL")
