"""Prompts for data distillation: questions on public data sets, and tasks on many subjects.

``python -m train.prompts --data FOLDER --out FILE`` reads these files, if FOLDER has them: ``tasks/gsm8k_train.jsonl``,
``tasks/wikisql/train.jsonl``, ``tasks/e2e_dev.csv``, ``text/python3.11_docs_rst.txt`` and ``text/wikitext2_valid.txt``.
It mixes their prompts with tasks of its own. The same seed and files give the same prompts.
"""

import argparse
import csv
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.errors import InvalidOption
from train.command import number, run_command
from train.data.prompt_tasks import GERMAN, QUESTIONS, SUBJECTS, TASKS
from train.texts.records import RecordWriter, read_records

# The share of each kind; if a kind has too few prompts, there are fewer in all.
SHARES = {"math": 0.24, "sql": 0.08, "documentation": 0.2, "encyclopedia": 0.18, "table": 0.04, "chat": 0.26}
_WORDS_OF_PASSAGE = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m train.prompts``."""
    parser.add_argument("--data", metavar="FOLDER", type=Path, required=True, help="folder with the public data sets")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, required=True, help="JSONL file to write, with 'prompt' and 'category'"
    )
    parser.add_argument(
        "--count", metavar="N", type=number(int, 1), default=2000, help="number of prompts (default: %(default)s)"
    )
    parser.add_argument("--seed", metavar="N", type=number(int, 0, 2**31 - 1), default=0, help="default: %(default)s")


def run(options: argparse.Namespace) -> int:
    """Write the prompts."""
    if options.out.exists():
        raise InvalidOption(f"{options.out}: exists; give another --out")
    prompts = mix(options.data, options.count, options.seed)
    with RecordWriter(options.out) as writer:
        writer.append(prompts)
    kinds = [prompt["category"] for prompt in prompts]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in SHARES)
    print(f"{options.out}: {len(prompts)} prompts: {counts}", file=sys.stderr)
    return 0


def mix(data: Path, count: int, seed: int) -> list[dict[str, str]]:
    """Return about ``count`` prompts of all kinds in random order, without duplicates."""
    rng = np.random.default_rng(seed)
    prompts = []
    for kind, share in SHARES.items():
        found = list(dict.fromkeys(_MAKERS[kind](data, rng)))
        wanted = round(count * share)
        prompts += [{"prompt": found[at], "category": kind} for at in rng.permutation(len(found))[:wanted]]
    return [prompts[at] for at in rng.permutation(len(prompts))]


def _math(data: Path, rng: Any) -> Iterator[str]:
    for record in read_records(data / "tasks" / "gsm8k_train.jsonl"):
        yield record.fields["question"]


def _sql(data: Path, rng: Any) -> Iterator[str]:
    forms = (
        "{table}\nWrite an SQL query that answers: {question}",
        "Given the table below, answer with an SQL query.\n{table}\nQuestion: {question}",
        "Translate the question into SQL. {table}\n{question}",
        "{table}\nWhich SQL statement would tell me this: {question} Explain it briefly.",
    )
    for record in read_records(data / "tasks" / "wikisql" / "train.jsonl"):
        table, _, rest = record.fields["text"].partition("\nQ: ")
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
    yield from _about_passages(_passages(re.sub(r":\w+:`~?([^`<]*)[^`]*`", r"\1", text).replace("``", "`")), rng)


def _encyclopedia(data: Path, rng: Any) -> Iterator[str]:
    text = (data / "text" / "wikitext2_valid.txt").read_text(encoding="utf-8")
    text = re.sub(r" @(.)@ ", r"\1", text)
    text = re.sub(r" ([,.;:!?)'])", r"\1", text.replace(" n't", "n't")).replace("( ", "(")
    passages = list(_passages("\n\n".join(line.strip() for line in text.splitlines())))
    yield from _about_passages(iter(passages), rng)
    for passage in passages[::3]:
        yield f"Translate English to {rng.choice(['French', 'German', 'Spanish'])}: {passage.partition('. ')[0]}."


def _passages(text: str) -> Iterator[str]:
    """Yield paragraphs of prose, cut to a number of words."""
    for paragraph in re.split(r"\n\s*\n", text):
        words = paragraph.split()
        cut = " ".join(words[:_WORDS_OF_PASSAGE])
        is_prose = len(words) > 40 and cut[0].isupper() and ".." not in cut and "<unk>" not in cut
        if is_prose and ". " in cut:
            yield cut[: cut.rindex(". ") + 1]


def _about_passages(passages: Iterator[str], rng: Any) -> Iterator[str]:
    forms = (
        "Summarize: {passage}",
        "Summarize the following text in two sentences.\n\n{passage}",
        "{passage}\n\nWhat are the most important points of this text?",
        "Read this and write three questions with their answers.\n\n{passage}",
        "{passage} Based on the text above, what is it about?",
        "Rewrite this in simpler words: {passage}",
        "{passage} Question: what does the text say first? Answer:",
        "Extract the names and numbers from the text as a list.\n\n{passage}",
    )
    for passage in passages:
        yield str(rng.choice(forms)).format(passage=passage)


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
}


if __name__ == "__main__":
    sys.exit(run_command("prompts", "Write prompts for data distillation.", add_arguments, run))
