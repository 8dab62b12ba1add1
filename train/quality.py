"""``python -m train.quality``: the quality of a model's answers, and a strategy's tokens per step.

Training a model together with its drafter changes the model. This measures the effect on tasks with known answers.
Answers are greedy. They are scored by *exact match*, where runs of blanks count as one, and by ROUGE-1, -2, -L and
-LSum (Lin 2004; F-measures of stemmed words, the best of all references; LSum compares sentence by sentence).
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxinfer.errors import InvalidOption
from jaxinfer.model_loading import DEFAULT_MODEL, load
from jaxinfer.results import GenerationResult
from train.arguments import add_answer_arguments
from train.command import existing_file, run_command
from train.data.target_texts import encode_prompt
from train.loop.progress import step_progress
from train.texts.records import Record, RecordWriter, read_records

_ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
_SENTENCE_ENDS = re.compile(r"(?<=[.!?]) ")


@dataclass(frozen=True)
class Judged:
    """One answer: its scores, from 0 to 1, and its steps; ``tokens`` excludes the prompt's."""

    category: str
    exact: float
    rouge1: float
    rouge2: float
    rougeL: float
    rougeLsum: float
    tokens: int
    steps: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m train.quality``."""
    parser.add_argument("--model", metavar="M", default=DEFAULT_MODEL, help="model that answers (default: %(default)s)")
    parser.add_argument(
        "--data",
        metavar="FILE",
        type=existing_file,
        required=True,
        help="JSONL file; each line has 'prompt' and 'references' (or one 'response'), and may have 'category'",
    )
    parser.add_argument(
        "--strategy", metavar="S", default="autoregressive", help="how to decode (default: %(default)s)"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="JSONL file to write: each answer and its scores")
    parser.add_argument("--raw", action="store_true", help="continue prompts without the model's chat template")
    add_answer_arguments(parser, max_new_tokens=128, batch_size=16)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(options: argparse.Namespace) -> int:
    """Answer all prompts, score the answers and print the figures."""
    if options.out is not None and options.out.exists():
        raise InvalidOption(f"{options.out}: exists; give another --out")
    records = read_records(options.data)
    references = [references_of(record) for record in records]
    scorer = build_scorer()
    with ExitStack() as stack:  # a problem with the output file is found before the slow loading of the model
        writer = None if options.out is None else stack.enter_context(RecordWriter(options.out))
        lm = load(options.model, dtype=options.dtype, notice=lambda line: print(line, file=sys.stderr))
        prompts = [encode_prompt(lm, question_of(record), is_raw=options.raw) for record in records]
        batches = lm.generate_batches(
            [prompt.tokens for prompt in prompts],
            max_new_tokens=options.max_new_tokens,
            strategy=options.strategy,
            batch_size=options.batch_size,
        )
        judged: list[Judged] = []
        report = stack.enter_context(step_progress("quality", len(prompts)))
        for results in batches:
            first = len(judged)
            for at, result in enumerate(results, first):
                judged.append(judge(scorer, result, references[at], prompts[at].category))
            if writer is not None:
                writer.append(
                    [
                        {"line": prompts[at].line, "text": result.text, **asdict(judged[at])}
                        for at, result in enumerate(results, first)
                    ]
                )
            report(len(judged), f"exact {100 * statistics.fmean(one.exact for one in judged):.0f}%")
    figures = figures_of(judged)
    print(json.dumps(figures) if options.json else describe(figures))
    return 0


def question_of(record: Record) -> Record:
    """Return a record without its answer."""
    return record._replace(fields={name: value for name, value in record.fields.items() if name != "response"})


def references_of(record: Record) -> list[str]:
    """Return a record's right answers; raises InvalidOption if there are none."""
    found = record.fields.get("references", record.fields.get("response"))
    found = [found] if isinstance(found, str) else found
    if not isinstance(found, list) or not found or not all(isinstance(one, str) and one.strip() for one in found):
        raise InvalidOption(f"{record.where}: needs 'references', a list of texts, or a 'response'")
    return found


def build_scorer() -> Any:
    """Return the ROUGE scorer."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise InvalidOption('ROUGE needs the package rouge-score: pip install -e ".[train]"') from None
    return RougeScorer(list(_ROUGE), use_stemmer=True)


def judge(scorer: Any, result: GenerationResult, references: Sequence[str], category: str) -> Judged:
    """Compare an answer with its references."""
    text = " ".join(result.text.split())
    by_sentence = [_SENTENCE_ENDS.sub("\n", " ".join(one.split())) for one in (text, *references)]
    scores = scorer.score_multi(by_sentence[1:], by_sentence[0])
    return Judged(
        category,
        float(text in {" ".join(one.split()) for one in references}),
        **{name: float(scores[name].fmeasure) for name in _ROUGE},
        tokens=result.stats.new_tokens,
        steps=result.stats.steps,
    )


def figures_of(judged: Sequence[Judged]) -> dict[str, Any]:
    """Return the means ``overall`` and, if there are several ``categories``, of each."""
    groups: dict[str, list[Judged]] = {}
    for one in judged:
        groups.setdefault(one.category, []).append(one)
    categories = {name: _means(group) for name, group in groups.items()} if len(groups) > 1 else {}
    return {"overall": _means(judged), "categories": categories}


def _means(group: Sequence[Judged]) -> dict[str, float]:
    means = {name: statistics.fmean(getattr(one, name) for one in group) for name in ("exact", *_ROUGE)}
    # A request's first new token comes from prefill, without a step.
    steps = sum(one.steps for one in group)
    pace = sum(one.tokens - 1 for one in group) / steps if steps else 0.0
    return {"answers": float(len(group)), **means, "tokens_per_step": pace}


def describe(figures: Mapping[str, Any]) -> str:
    """Return the figures as a table."""
    head = f"{'':16} {'answers':>8} {'exact':>7} {'R-1':>7} {'R-2':>7} {'R-L':>7} {'R-LSum':>7} {'tokens a step':>14}"
    rows = [
        f"{name or '(none)':16.16} {means['answers']:8.0f} "
        + " ".join(f"{100 * means[key]:6.1f}%" for key in ("exact", *_ROUGE))
        + f" {means['tokens_per_step']:14.2f}"
        for name, means in {**figures["categories"], "overall": figures["overall"]}.items()
    ]
    return "\n".join([head, *rows])


if __name__ == "__main__":
    sys.exit(run_command("quality", "Measure a model's answers to tasks with known answers.", add_arguments, run))
