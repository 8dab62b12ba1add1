"""JSONL files, one JSON object per line: errors name the line, and writing never leaves half a line."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxinfer.errors import InvalidOption, WriteFailed


class Record(NamedTuple):
    """One line's object, its number from 1, and its location for messages."""

    line: int
    where: str
    fields: Mapping[str, Any]

    def text(self, name: str) -> str:
        """Return a field that has to be text; raises InvalidOption where it is not."""
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise InvalidOption(f"{self.where}: needs text in {name!r}")
        return value


def read_records(path: Path) -> list[Record]:
    """Read a whole file; raises InvalidOption, with file and line, for an empty line or one without a JSON object."""
    records = []
    with path.open("rb") as file:
        for line, raw in enumerate(file, 1):
            where = f"{path}, line {line}"
            try:
                text = raw.decode("utf-8-sig" if line == 1 else "utf-8").strip()
            except UnicodeDecodeError:
                raise InvalidOption(f"{where}: not UTF-8 text; convert the file to UTF-8") from None
            if not text:
                raise InvalidOption(f"{where}: an empty line; remove it")
            records.append(Record(line, where, _parse(where, text)))
    if not records:
        raise InvalidOption(f"{path} is empty: write one JSON object a line")
    return records


def _parse(where: str, text: str) -> Mapping[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise InvalidOption(f"{where}: not JSON ({reason}); write one JSON object a line") from None
    if not isinstance(fields, dict):
        raise InvalidOption(f'{where}: {text:.40} is no JSON object, such as {{"text": "..."}}')
    return fields


def messages_of(record: Record) -> list[dict[str, str]] | None:
    """Return a record's conversation, from ``messages``, ``prompt`` with ``response``, or ``turns`` (the first counts).

    None if the record has none of these. Raises InvalidOption for an empty or malformed conversation.
    """
    fields, where = record.fields, record.where
    if "messages" in fields:
        return _check_messages(fields["messages"], where)
    prompt = fields.get("prompt")
    if prompt is None and isinstance(fields.get("turns"), list) and fields["turns"]:
        prompt = fields["turns"][0]
    if prompt is None:
        return None
    contents = [("user", prompt)] + ([("assistant", fields["response"])] if "response" in fields else [])
    return _check_messages([{"role": role, "content": content} for role, content in contents], where)


def _check_messages(messages: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise InvalidOption(f"{where}: messages must be a list of {{'role', 'content'}} objects")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidOption(f"{where}: a message needs a 'role' and a 'content', both texts")
        if not isinstance(message.get("content"), str) or not message["content"].strip():
            raise InvalidOption(f"{where}: the {message['role']}'s text is empty; write one or remove the line")
    return messages


class RecordWriter:
    """Appends whole lines to a file; earlier lines stay, half a line left by a killed process is removed.

    Raises InvalidOption for a file that does not end in such a line: another program wrote it.
    """

    def __init__(self, path: Path) -> None:
        if not path.parent.is_dir():
            raise InvalidOption(f"{path.parent}: no such folder; create it first")
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self._end = _end_of_lines(self._file)
        if os.pread(self._file, 1, self._end) not in (b"", b"{"):
            os.close(self._file)
            raise InvalidOption(f"{path}: ends with something that no such command has written; give another --out")
        os.ftruncate(self._file, self._end)

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write records to the disk, all of them or none; raises WriteFailed if the disk is full."""
        data = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._file, data[written:], self._end + written)
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self._end)
            raise WriteFailed(f"{self._path}: {error.strerror}; what was written before is intact") from None
        self._end += len(data)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close()


def _end_of_lines(file: int, piece: int = 1 << 16) -> int:
    """Return the end of the file's last whole line."""
    end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - piece)
        found = os.pread(file, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def read_written(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the records that a `RecordWriter` has written so far, without half a line at the end."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line, raw in enumerate(file, 1):
            if raw.endswith(b"\n"):
                yield _parse(f"{path}, line {line}", raw.decode("utf-8", errors="replace"))
