"""The tasks of the talks: questions to SQL, articles to summarize, and facts of a restaurant to put into words."""

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from train.data.tasks import read_sql, read_table
from train.texts.records import RecordWriter, read_records

# What Spec-Bench calls the third one.
_SUMMARIES = "summarization"
TASKS: Mapping[str, str] = MappingProxyType(
    {"sql": "questions to SQL", "summaries": "summaries of articles", "e2e": "facts to text"}
)
# Of each task's training part, how much of the answers that drafters learn from.
_SHARES: Mapping[str, float] = MappingProxyType({"sql": 0.75, "e2e": 0.25})


def write_test_prompts(data: Path, task: str, count: int, out: Path) -> Path:
    """Write a task's first ``count`` test prompts with their references, if it has any, unless they are there."""
    return _write(out, islice(_test_records(data, task), count))


def write_train_prompts(data: Path, count: int, out: Path) -> Path:
    """Write about ``count`` prompts of the parts that are for training, unless they are there.

    Summaries have no such part: what is learned of them is learned from the other two.
    """
    readers = {"sql": read_sql, "e2e": read_table}
    parts = {task: islice(readers[task](data, "train"), round(count * share)) for task, share in _SHARES.items()}
    return _write(out, ({"prompt": one.prompt, "category": task} for task, part in parts.items() for one in part))


def _test_records(data: Path, task: str) -> Iterator[dict[str, Any]]:
    if task == "summaries":
        for record in read_records(data / "prompts" / "spec_bench.jsonl"):
            if record.fields.get("category") == _SUMMARIES:
                yield {"prompt": record.fields["turns"][0], "category": task}
        return
    for one in (read_sql if task == "sql" else read_table)(data, "test"):
        yield {"prompt": one.prompt, "category": task, "references": one.answers}


def _write(out: Path, records: Iterator[dict[str, Any]]) -> Path:
    if not out.is_file():
        partial = out.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        with RecordWriter(partial) as writer:
            writer.append(list(records))
        partial.rename(out)
    return out
