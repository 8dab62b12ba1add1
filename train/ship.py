"""``python -m train.ship``: makes the drafters that come with the package anew, from the model and public data sets.

It runs the commands that made them, one after the other, and puts what they write into ``jaxinfer/drafters``. Each goes
on where it was interrupted, and so does the whole. On two cores of an AMD EPYC, with other work beside it, it takes
four hours: answers 50 minutes, hidden states 40, heads 60, the streams' states 25 and streams 55.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from jaxinfer.checkpoint.drafters import DRAFTERS
from jaxinfer.checkpoint.new_folder import new_folder
from jaxinfer.errors import JaxinferError
from jaxinfer.language_model import DEFAULT_MODEL
from train.command import run_command

ASKED = ("train.prompts", "--count", "4000", "--seed", "0")
ANSWERS = ("train.data", "distill", "--dtype", "bfloat16", "--max-new-tokens", "160")
HEADS = (
    *("train.medusa", "--dtype", "float32", "--hydra", "--inner", "768", "--heads", "4", "--share-lm-head"),
    *("--draft-vocab", "16384", "--int8", "--soft-targets", "0.5", "--dropout", "0.05", "--weight-decay", "0.01"),
    *("--epochs", "2", "--batch-size", "16", "--window", "32", "--learning-rate", "1e-3", "--held-out", "0.03"),
)
# As many parameters as a quarter of those of plain Medusa heads that share the model's output matrix.
STREAMS = (
    *("train.streams", "--dtype", "float32", "--streams", "3", "--layers", "4", "--adapter-rank", "7", "--rank", "24"),
    *("--exit-rank", "8", "--loss-vocab", "8192", "--row-length", "512", "--batch-size", "4", "--positions", "128"),
    *("--epochs", "2.5", "--learning-rate", "5e-3", "--held-out", "0.03"),
)

DATA = """
## Data

Text that the model wrote itself, greedily and in bfloat16, at most 160 tokens after each of 3,306 prompts in its chat
template: 422,542 tokens. The prompts are those of `python -m train.prompts --count 4000`: 960 questions of GSM8K's
training set (MIT), 320 of WikiSQL's (MIT), 800 on functions and passages of the documentation of Python 3.11 (PSF), 56
on passages of WikiText-2's validation set (CC BY-SA), 160 descriptions from E2E's development set (CC BY-SA 4.0), and
1,010 tasks and questions of the project's own. None of Spec-Bench, on which figures are given, is among them.
"""


class StepFailed(JaxinferError, RuntimeError):
    """A command of the recipe ended with a mistake, which it has told."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m train.ship``."""
    parser.add_argument("--data", metavar="FOLDER", type=Path, required=True, help="the data sets of train.prompts")
    parser.add_argument("--work", metavar="FOLDER", type=Path, required=True, help="for everything on the way")
    parser.add_argument("--to", metavar="FOLDER", type=Path, default=DRAFTERS, help="default: %(default)s")


def run(options: argparse.Namespace) -> int:
    """Make prompts, answers and drafters, and put these into their place."""
    work, place = options.work, options.to / DEFAULT_MODEL
    work.mkdir(parents=True, exist_ok=True)
    asked, answers = work / "prompts.jsonl", work / "answers.jsonl"
    if not asked.is_file():
        call(*ASKED, "--data", options.data, "--out", asked)
    call(*ANSWERS, "--prompts", asked, "--out", answers)
    call(*HEADS, "--data", answers, "--out", work / "heads_run")
    call(*STREAMS, "--data", answers, "--out", work / "streams_run")
    ship(work / "heads_run" / "heads", place / "heads", "heads", DATA)
    ship(work / "streams_run" / "streams", place / "streams", "streams", DATA)
    return 0


def call(command: str, *arguments: object) -> None:
    """Run a command of this package."""
    told = [sys.executable, "-m", command, *map(str, arguments)]
    print(" ".join(told[1:]), file=sys.stderr)
    code = subprocess.run(told).returncode
    if code:
        raise StepFailed(f"{command} ended with exit code {code}; the same command goes on from there")


def ship(made: Path, place: Path, kind: str, data: str) -> None:
    """Replace the drafters at a place by those that were made; ``data`` goes to the end of their card."""
    files = (f"{kind}.json", f"{kind}.safetensors", "tree.json", "tree_64.json", "README.md")
    place.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(place, f"{kind}.json") as new:
        for name in files:
            shutil.copyfile(made / name, new / name)
        with (new / "README.md").open("a", encoding="utf-8") as card:
            card.write(data)
    size = sum((place / name).stat().st_size for name in files)
    print(f"{place}: {size / 1e6:.1f} MB", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_command("ship", "Make the package's drafters anew.", add_arguments, run))
