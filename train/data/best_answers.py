"""Quality filtering: of the answers that a model wrote, the best share, to learn from.

``python -m train.data best`` scores each answer of a file of ``train.data distill``. By ``likelihood`` that is the mean
log-probability that a model gives the answer's tokens; by ``checks`` the number of checks that it passes: it ended by
itself, and does not go round in circles. Equal scores are taken in the file's order, and the file keeps its order.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinfer.errors import InvalidOption
from jaxinfer.language_model import LanguageModel
from jaxinfer.model_loading import DEFAULT_MODEL, load
from jaxinfer.text_scores import score_text
from train.command import existing_file, number
from train.loop.progress import step_progress
from train.texts.records import Record, RecordWriter, read_records

WAYS = ("likelihood", "checks")
# A text goes round in circles where fewer than this share of its runs of so many tokens are different ones.
_RUN, _DIFFERENT = 4, 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m train.data best``."""
    parser.add_argument(
        "--data", metavar="FILE", type=existing_file, required=True, help="answers, as train.data distill writes them"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="JSONL file to write")
    parser.add_argument(
        "--share", metavar="P", type=number(float, 1e-6, 1), default=0.5, help="to keep (default: %(default)s)"
    )
    parser.add_argument("--by", choices=WAYS, default="likelihood", help="default: %(default)s")
    parser.add_argument("--model", metavar="M", default=DEFAULT_MODEL, help="of the likelihood (default: %(default)s)")
    parser.add_argument("--dtype", metavar="D", help="default: float32 on a CPU, else bfloat16")


def run(options: argparse.Namespace) -> int:
    """Write the best answers."""
    if options.out.exists():
        raise InvalidOption(f"{options.out}: exists; give another --out")
    records = read_records(options.data)
    for record in records:
        check_answer(record)
    with RecordWriter(options.out) as writer:  # opened before the slow loading of the model
        scores = score(records, options)
        kept = best_places(scores, options.share)
        writer.append([records[at].fields for at in kept])
    means = (statistics.fmean(scores[at] for at in places) for places in (range(len(scores)), kept))
    said = "mean score {:.3f} of all, {:.3f} of those kept".format(*means)
    print(f"{options.out}: {len(kept)} of {len(records)} answers; {said}", file=sys.stderr)
    return 0


def check_answer(record: Record) -> None:
    """Raise InvalidOption for a line that is no answer of ``train.data distill``."""
    for name in ("prompt_tokens", "tokens"):
        ids = record.fields.get(name)
        if not isinstance(ids, list) or not ids or not all(type(one) is int for one in ids):
            raise InvalidOption(f"{record.where}: needs '{name}', a list of token ids, as train.data distill writes it")


def score(records: Sequence[Record], options: argparse.Namespace) -> list[float]:
    """Return each answer's score."""
    if options.by == "checks":
        return [float(sum(checks(record.fields))) for record in records]
    lm = load(options.model, dtype=options.dtype, notice=lambda line: print(line, file=sys.stderr))
    with step_progress("likelihood", len(records)) as report:
        scores = []
        for record in records:
            scores.append(likelihood(lm, record.fields))
            report(len(scores), "")
    return scores


def likelihood(lm: LanguageModel, answer: Mapping[str, Any]) -> float:
    """Return the mean log-probability of an answer's tokens after its prompt, in nats."""
    prompt, tokens = answer["prompt_tokens"], answer["tokens"]
    return statistics.fmean(score_text(lm, [*prompt, *tokens]).logprobs[len(prompt) - 1 :])


def checks(answer: Mapping[str, Any]) -> tuple[bool, bool]:
    """Tell whether an answer ended by itself, and whether it does not go round in circles."""
    tokens = answer["tokens"]
    runs = [tuple(tokens[at : at + _RUN]) for at in range(len(tokens) - _RUN + 1)]
    return answer.get("finish_reason") == "stop", len(set(runs)) >= _DIFFERENT * len(runs)


def best_places(scores: Sequence[float], share: float) -> list[int]:
    """Return the places of the best share of scores, at least one, in rising order; of equal ones the first."""
    count = max(1, round(share * len(scores)))
    return sorted(sorted(range(len(scores)), key=lambda at: (-scores[at], at))[:count])
