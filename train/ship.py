"""``python -m train.ship``: trains the drafters of the package again, from the model and public data sets.

It runs their commands one after another and copies the results into ``jaxinfer/drafters``. Each command, and the whole,
resumes after an interrupt. On two cores of an AMD EPYC it takes six hours and a half: the model's own prompts 10
minutes, answers 47, hidden states 50, and 17 and 18 for EAGLE's, heads 27, the streams' states 25 and streams 55, EAGLE
58 and 60.
"""

import argparse
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from jaxinfer.checkpoint.drafters.shipped import DRAFTERS, FILES
from jaxinfer.checkpoint.new_folder import new_folder
from jaxinfer.model_loading import DEFAULT_MODEL
from train.command import run_command
from train.data.self_prompts import CATEGORY
from train.recipe import call
from train.texts.records import read_records

ASKED = ("train.prompts", "--count", "4000", "--seed", "0")
ASKED_MORE = ("train.prompts", "--count", "600", "--seed", "5")
TASKS = ("train.prompts", "--mixture", "tasks", "--count", "2700", "--seed", "0")
SELF_WRITTEN = ("train.data", "prompts", "--dtype", "bfloat16", "--count", "1200", "--seed", "0")
SELF_WRITTEN_MORE = ("train.data", "prompts", "--dtype", "bfloat16", "--count", "800", "--seed", "1")
ANSWERS = ("train.data", "distill", "--dtype", "bfloat16", "--max-new-tokens", "160")
HEADS = (
    *("train.medusa", "--dtype", "float32", "--hydra", "--inner", "768", "--heads", "4", "--share-lm-head"),
    *("--draft-vocab", "16384", "--int8", "--soft-targets", "0.5", "--dropout", "0.05", "--weight-decay", "0.01"),
    *("--epochs", "1.5", "--batch-size", "16", "--window", "32", "--learning-rate", "1e-3", "--held-out", "0.03"),
)
# A quarter of the parameters of plain Medusa heads that share the model's output matrix.
STREAMS = (
    *("train.streams", "--dtype", "float32", "--streams", "3", "--layers", "4", "--adapter-rank", "7", "--rank", "24"),
    *("--exit-rank", "8", "--loss-vocab", "8192", "--row-length", "512", "--batch-size", "4", "--positions", "128"),
    *("--epochs", "2.5", "--learning-rate", "5e-3", "--held-out", "0.03"),
)
EAGLE = (
    *("train.eagle", "--dtype", "bfloat16", "--compute-dtype", "bfloat16", "--draft-vocab", "16384"),
    *("--share-lm-head", "--steps", "4", "--epochs", "2.5", "--batch-size", "4", "--learning-rate", "2e-3"),
    *("--warmup", "0.05", "--held-out", "0.02", "--eval-every", "250"),
)
# The drafter goes on with texts of more kinds, some of them long, and may guess more words.
EAGLE_MORE = (
    *("train.eagle", "--dtype", "bfloat16", "--compute-dtype", "bfloat16", "--draft-vocab", "32768"),
    *("--steps", "4", "--epochs", "1.5", "--row-length", "1024", "--batch-size", "2", "--learning-rate", "1e-3"),
    *("--warmup", "0.05", "--held-out", "0.02", "--eval-every", "100"),
)

# The source of each category's prompts.
SOURCES = {
    "math": "questions of GSM8K's training set (MIT)",
    "sql": "questions of WikiSQL's training set (MIT)",
    "documentation": "on functions and passages of the documentation of Python 3.11 (PSF)",
    "encyclopedia": "on passages of WikiText-2's validation set (CC BY-SA)",
    "table": "descriptions from E2E's development set (CC BY-SA 4.0)",
    "chat": "tasks and questions of this project's own",
    "news": "on articles of CNN/DailyMail (Apache 2.0) and XSum (MIT), as sampled for T0",
    "reading": "on passages of AdversarialQA (CC BY-SA 4.0), Quoref and ROPES (CC BY 4.0), most with their questions",
    "question": "questions of HotpotQA (CC BY-SA 4.0) and CommonsenseQA (MIT)",
    "translation": "German sentences of the treebank GSD (CC BY-SA 4.0)",
    "instruction": "instructions of Self-Instruct's seeds and its user-oriented tasks (Apache 2.0)",
    CATEGORY: "that the model wrote itself, as `python -m train.data prompts` draws them",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m train.ship``."""
    parser.add_argument(
        "--data", metavar="FOLDER", type=Path, required=True, help="folder with the data sets of train.prompts"
    )
    parser.add_argument(
        "--work", metavar="FOLDER", type=Path, required=True, help="folder for prompts, answers and runs"
    )
    parser.add_argument(
        "--to", metavar="FOLDER", type=Path, default=DRAFTERS, help="folder of the drafters (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """Create prompts, answers and drafters, and copy the drafters to their folder."""
    work, place = options.work, options.to / DEFAULT_MODEL
    work.mkdir(parents=True, exist_ok=True)
    first = [answer(options, ASKED, ""), answer_itself(options, SELF_WRITTEN, "")]
    call(*HEADS, "--data", *first, "--out", work / "heads_run")
    call(*STREAMS, "--data", first[0], "--out", work / "streams_run")
    call(*EAGLE, "--data", *first, "--out", work / "eagle_run")
    more = [
        answer(options, ASKED_MORE, "more_"),
        answer(options, TASKS, "task_"),
        answer_itself(options, SELF_WRITTEN_MORE, "more_"),
    ]
    begun = work / "eagle_run" / "drafter"
    call(*EAGLE_MORE, "--init", begun, "--data", *more, "--out", work / "eagle_more_run")
    ship(work / "heads_run" / "heads", place / "heads", "heads", first)
    ship(work / "streams_run" / "streams", place / "streams", "streams", first[:1])
    ship(work / "eagle_more_run" / "drafter", place / "eagle", "eagle", first + more)
    return 0


def answer(options: argparse.Namespace, asked: Sequence[str], kind: str) -> Path:
    """Create prompts from data sets, and the model's answers; return the file with the answers."""
    prompts, answers = (options.work / f"{kind}{name}.jsonl" for name in ("prompts", "answers"))
    if not prompts.is_file():
        partial = prompts.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        call(*asked, "--data", options.data, "--out", partial)
        partial.rename(prompts)
    call(*ANSWERS, "--prompts", prompts, "--out", answers)
    return answers


def answer_itself(options: argparse.Namespace, written: Sequence[str], kind: str) -> Path:
    """Let the model write prompts and answer them; return the file with the answers."""
    prompts, answers = (options.work / f"{kind}self_{name}.jsonl" for name in ("prompts", "answers"))
    call(*written, "--out", prompts)
    call(*ANSWERS, "--prompts", prompts, "--out", answers)
    return answers


def describe_data(answers: Sequence[Path]) -> str:
    """Return the card's section on the texts that the model wrote."""
    found = [record.fields for path in answers for record in read_records(path)]
    # The own tasks and questions come again in the second mixture.
    records = list({tuple(record["prompt_tokens"]): record for record in found}.values())
    counts = Counter(record["category"] for record in records)
    num_tokens = sum(len(record["tokens"]) for record in records)
    prompts = [f"* {counts[name]:,} {source}" for name, source in SOURCES.items() if counts[name]]
    return "\n".join(
        [
            "",
            "## Data",
            "",
            f"Text that the model wrote, greedily and in bfloat16, at most {ANSWERS[-1]} tokens after each of "
            f"{len(records):,} prompts in its chat template: {num_tokens:,} tokens. The prompts:",
            "",
            *prompts,
            "",
            "None was taken from Spec-Bench, on which figures are given.",
            "",
        ]
    )


def ship(made: Path, place: Path, kind: str, answers: Sequence[Path]) -> None:
    """Replace the drafters in a folder by new ones; their card ends with the ``answers`` that they learned from."""
    description, weights = FILES[kind]
    files = (description, weights, "tree.json", "tree_64.json", "README.md")
    place.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(place, description) as new:
        for name in files:
            shutil.copyfile(made / name, new / name)
        with (new / "README.md").open("a", encoding="utf-8") as card:
            card.write(describe_data(answers))
    size = sum((place / name).stat().st_size for name in files)
    print(f"{place}: {size / 1e6:.1f} MB", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_command("ship", "Train the drafters that come with the package.", add_arguments, run))
