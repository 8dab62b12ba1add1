"""Tasks with a right answer, for fine-tuning and for `train.quality`: questions to SQL, and facts to text.

``python -m train.data task`` writes one JSON object per line, with ``prompt``, ``category``, and ``response`` for
training or ``references`` for evaluation. FOLDER holds parts of WikiSQL (Zhong et al., 1709.00103) as
``tasks/wikisql/SPLIT.jsonl``, where each line's ``text`` is a table, a line ``Q: `` and a line ``A: ``. It also holds
the development set of E2E (Novikova et al., 1706.09254) as ``tasks/e2e_dev.csv``; the last tenth of its meaning
representations is kept for evaluation.
"""

import argparse
import csv
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxinfer.errors import InvalidOption
from train.command import number
from train.texts.records import RecordWriter, read_records

SPLITS = ("train", "test")
# One in this many meaning representations is kept for evaluation.
_KEPT_OF = 10


class Task(NamedTuple):
    """A prompt and all of its right answers."""

    prompt: str
    answers: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m train.data task``."""
    parser.add_argument(
        "--kind",
        choices=tuple(_READERS),
        required=True,
        help="sql: questions to SQL (WikiSQL); table: facts to text (E2E)",
    )
    parser.add_argument(
        "--data", metavar="FOLDER", type=Path, required=True, help="folder with tasks/wikisql and tasks/e2e_dev.csv"
    )
    parser.add_argument("--split", choices=SPLITS, required=True, help="the part to train on, or the part to test on")
    parser.add_argument("--count", metavar="N", type=number(int, 1), help="write the first N tasks (default: all)")
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="JSONL file to write")


def run(options: argparse.Namespace) -> int:
    """Write the tasks of one split."""
    if options.out.exists():
        raise InvalidOption(f"{options.out}: exists; give another --out")
    tasks = list(_READERS[options.kind](options.data, options.split))[: options.count]
    records: list[dict[str, Any]] = []
    for task in tasks:
        shared = {"prompt": task.prompt, "category": options.kind}
        if options.split == "train":
            records += [{**shared, "response": answer} for answer in task.answers]
        else:
            records.append({**shared, "references": task.answers})
    with RecordWriter(options.out) as writer:
        writer.append(records)
    print(f"{options.out}: {len(records)} lines on {len(tasks)} prompts", file=sys.stderr)
    return 0


def read_sql(data: Path, split: str) -> Iterator[Task]:
    """Yield questions about a table's columns."""
    for record in read_records(data / "tasks" / "wikisql" / f"{split}.jsonl"):
        asked, found, query = str(record.fields.get("text", "")).partition("\nA: ")
        if not found:
            raise InvalidOption(f"{record.where}: the text has no line that begins with 'A: '")
        yield Task(f"Write the SQL query that answers the question.\n{asked}", [query.strip()])


def read_table(data: Path, split: str) -> Iterator[Task]:
    """Yield meaning representations of restaurants."""
    path = data / "tasks" / "e2e_dev.csv"
    by_facts: dict[str, list[str]] = {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                by_facts.setdefault(row["mr"], []).append(row["ref"])
    except (KeyError, UnicodeDecodeError, csv.Error):
        raise InvalidOption(f"{path}: is not a CSV file in UTF-8 with columns 'mr' and 'ref'") from None
    if not by_facts:
        raise InvalidOption(f"{path}: has no rows")
    first_kept = len(by_facts) - max(1, len(by_facts) // _KEPT_OF)
    for at, (facts, texts) in enumerate(by_facts.items()):
        if (at >= first_kept) == (split == "test"):
            yield Task(f"Describe the restaurant in one or two sentences.\n{facts}", texts)


_READERS: dict[str, Callable[[Path, str], Iterator[Task]]] = {"sql": read_sql, "table": read_table}
