"""Prompts for data distillation: questions on public data sets, and tasks on many subjects.

``python -m train.prompts --data FOLDER --out FILE`` reads these files of FOLDER: ``tasks/gsm8k_train.jsonl``,
``tasks/wikisql/train.jsonl``, ``tasks/e2e_dev.csv``, ``text/python3.11_docs_rst.txt`` and ``text/wikitext2_valid.txt``.
It mixes their prompts with tasks of its own. ``--mixture tasks`` reads those of ``train.data.public_tasks`` instead:
news, questions with and without a text, translation and instructions. The same seed and files give the same prompts.
"""

import argparse
import csv
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.errors import InvalidOption
from train.command import number, run_command
from train.data import public_tasks
from train.data.passages import about_passages, split_passages
from train.data.prompt_tasks import GERMAN, QUESTIONS, SUBJECTS, TASKS
from train.texts.records import RecordWriter, read_records

# The share of each kind; if a kind has too few prompts, there are fewer in all.
MIXTURES = {
    "texts": {"math": 0.24, "sql": 0.08, "documentation": 0.2, "encyclopedia": 0.18, "table": 0.04, "chat": 0.26},
    "tasks": {"news": 0.25, "reading": 0.33, "question": 0.14, "translation": 0.12, "instruction": 0.16},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m train.prompts``."""
    parser.add_argument("--data", metavar="FOLDER", type=Path, required=True, help="folder with the public data sets")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, required=True, help="JSONL file to write, with 'prompt' and 'category'"
    )
    parser.add_argument(
        "--count", metavar="N", type=number(int, 1), default=2000, help="number of prompts (default: %(default)s)"
    )
    parser.add_argument(
        "--mixture", choices=sorted(MIXTURES), default="texts", help="kinds of prompts (default: %(default)s)"
    )
    parser.add_argument("--seed", metavar="N", type=number(int, 0, 2**31 - 1), default=0, help="default: %(default)s")


def run(options: argparse.Namespace) -> int:
    """Write the prompts."""
    if options.out.exists():
        raise InvalidOption(f"{options.out}: exists; give another --out")
    shares = MIXTURES[options.mixture]
    prompts = mix(options.data, options.count, options.seed, shares)
    with RecordWriter(options.out) as writer:
        writer.append(prompts)
    kinds = [prompt["category"] for prompt in prompts]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in shares)
    print(f"{options.out}: {len(prompts)} prompts: {counts}", file=sys.stderr)
    return 0


def mix(data: Path, count: int, seed: int, shares: Mapping[str, float]) -> list[dict[str, str]]:
    """Return about ``count`` prompts of the kinds in ``shares``, in random order and without duplicates."""
    rng = np.random.default_rng(seed)
    prompts = []
    for kind, share in shares.items():
        found = list(dict.fromkeys(_MAKERS[kind](data, rng)))
        wanted = round(count * share)
        prompts += [{"prompt": found[at], "category": kind} for at in rng.permutation(len(found))[:wanted]]
    return [prompts[at] for at in rng.permutation(len(prompts))]


def _math(data: Path, rng: Any) -> Iterator[str]:
    for record in read_records(data / "tasks" / "gsm8k_train.jsonl"):
        yield record.text("question")


def _sql(data: Path, rng: Any) -> Iterator[str]:
    forms = (
        "{table}\nWrite an SQL query that answers: {question}",
        "Given the table below, answer with an SQL query.\n{table}\nQuestion: {question}",
        "Translate the question into SQL. {table}\n{question}",
        "{table}\nWhich SQL statement would tell me this: {question} Explain it briefly.",
    )
    for record in read_records(data / "tasks" / "wikisql" / "train.jsonl"):
        table, _, rest = record.text("text").partition("\nQ: ")
        yield str(rng.choice(forms)).format(table=table, question=rest.partition("\nA: ")[0].strip())


def _table(data: Path, rng: Any) -> Iterator[str]:
    forms = (
        "Describe this place in one or two sentences: {facts}",
        "Write a short text for a restaurant guide from these facts.\n{facts}",
        "Turn the data into a sentence: {facts}",
    )
    with (data / "tasks" / "e2e_dev.csv").open(encoding="utf-8", newline="") as file:
        for facts in dict.fromkeys(row["mr"] for row in csv.DictReader(file)):
            yield str(rng.choice(forms)).format(facts=facts)


def _documentation(data: Path, rng: Any) -> Iterator[str]:
    text = (data / "text" / "python3.11_docs_rst.txt").read_text(encoding="utf-8")
    forms = (
        "What does `{name}` do in Python? Give a short example.",
        "Write a Python program that uses `{name}`.",
        "Explain Python's `{name}` to a beginner.",
        "How do I use `{name}` in Python?",
        "Write a Python function that calls `{name}` and handles its errors. Then explain the code.",
    )
    for name in re.findall(r"^\.\. (?:function|class|method|exception|data):: ([A-Za-z_][\w.]{3,40})", text, re.M):
        yield str(rng.choice(forms)).format(name=name)
    yield from about_passages(split_passages(re.sub(r":\w+:`~?([^`<]*)[^`]*`", r"\1", text).replace("``", "`")), rng)


def _encyclopedia(data: Path, rng: Any) -> Iterator[str]:
    text = (data / "text" / "wikitext2_valid.txt").read_text(encoding="utf-8")
    text = re.sub(r" @(.)@ ", r"\1", text)
    text = re.sub(r" ([,.;:!?)'])", r"\1", text.replace(" n't", "n't")).replace("( ", "(")
    passages = list(split_passages("\n\n".join(line.strip() for line in text.splitlines())))
    yield from about_passages(iter(passages), rng)
    for passage in passages[::3]:
        yield f"Translate English to {rng.choice(['French', 'German', 'Spanish'])}: {passage.partition('. ')[0]}."


def _chat(data: Path, rng: Any) -> Iterator[str]:
    for sentence in GERMAN:
        yield f"Translate German to English: {sentence}"
    yield from QUESTIONS
    for task in TASKS:
        for subject in SUBJECTS:
            yield task.format(subject=subject)


_MAKERS: dict[str, Callable[[Path, Any], Iterator[str]]] = {
    "math": _math,
    "sql": _sql,
    "documentation": _documentation,
    "encyclopedia": _encyclopedia,
    "table": _table,
    "chat": _chat,
    "news": public_tasks.news,
    "reading": public_tasks.reading,
    "question": public_tasks.question,
    "translation": public_tasks.translation,
    "instruction": public_tasks.instruction,
}


if __name__ == "__main__":
    sys.exit(run_command("prompts", "Write prompts for data distillation.", add_arguments, run))
