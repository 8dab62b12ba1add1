"""Reads training texts from files: JSON lines of several forms, or plain text.

A line is one of three: ``{"text"}``, all predicted; a conversation (``messages``, or ``prompt`` and ``response``),
where the assistant's words and the token that ends each turn are predicted; or an answer of data distillation, where
the answer is predicted. Plain text is one long text, cut into pieces.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxinfer.errors import InvalidOption, InvalidTokenizer, JaxinferError
from jaxinfer.tokenizers import Tokenizer
from train.texts.packing import Example
from train.texts.records import Record, messages_of, read_records


def read_examples(path: Path, tokenizer: Tokenizer, longest: int) -> list[Example]:
    """Read a file's texts, none longer than ``longest`` tokens; errors name the line."""
    if path.suffix.lower() not in (".jsonl", ".json"):
        return _pieces(path, tokenizer, longest)
    examples = []
    for record in read_records(path):
        try:
            example = _read(record, tokenizer)
        except JaxinferError as error:
            message = str(error)
            raise InvalidOption(message if record.where in message else f"{record.where}: {message}") from None
        if len(example.tokens) > longest:
            raise InvalidOption(
                f"{record.where}: the text has {len(example.tokens)} tokens, but there is room for {longest}; "
                "shorten it or train on longer rows"
            )
        examples.append(example)
    return examples


def chat_example(messages: Sequence[dict[str, str]], tokenizer: Tokenizer) -> Example:
    """Encode a conversation; the assistant's words are predicted, with the token that ends its turn.

    Each answer is encoded after its prompt, as when the model writes it.
    """
    template = tokenizer.chat_template
    if template is None:
        raise InvalidTokenizer("this model has no chat template: give texts, not conversations")
    tokens: list[int] = []
    mask: list[bool] = []
    rendered = ""

    def extend(text: str, is_answer: bool) -> None:
        nonlocal rendered
        if not text.startswith(rendered):
            raise InvalidOption("the chat template changes earlier turns, so that they cannot be told apart")
        ids = tokenizer.encode(text[len(rendered) :], add_special_tokens=False)
        end = next((at + 1 for at, token in enumerate(ids) if token in tokenizer.eos_token_ids), len(ids))
        tokens.extend(ids)
        mask.extend([is_answer and at < end for at in range(len(ids))])
        rendered = text

    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            extend(template.render(messages[:turn], add_generation_prompt=True), is_answer=False)
            extend(template.render(messages[: turn + 1], add_generation_prompt=False), is_answer=True)
    if not any(mask):
        raise InvalidOption("the conversation has no answer by the assistant, so nothing to learn from")
    return Example(tuple(tokens), tuple(mask))


def _read(record: Record, tokenizer: Tokenizer) -> Example:
    fields = record.fields
    if "prompt_tokens" in fields and "tokens" in fields:
        prompt, answer = _ids(fields["prompt_tokens"], record), _ids(fields["tokens"], record)
        return Example((*prompt, *answer), (False,) * len(prompt) + (True,) * len(answer))
    if "text" in fields:
        if not isinstance(fields["text"], str) or not fields["text"].strip():
            raise InvalidOption(f"{record.where}: the text is empty; write one or remove the line")
        ids = tokenizer.encode(fields["text"])
        return Example(tuple(ids), (True,) * len(ids))
    messages = messages_of(record)
    if messages is None:
        raise InvalidOption(f"{record.where}: needs 'text', 'messages', or 'prompt' and 'response'")
    return chat_example(messages, tokenizer)


def _ids(value: Any, record: Record) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(one) is int and one >= 0 for one in value):
        raise InvalidOption(f"{record.where}: prompt_tokens and tokens must be lists of token ids, not empty")
    return value


def _pieces(path: Path, tokenizer: Tokenizer, longest: int) -> list[Example]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidOption(f"{path}: not UTF-8 text; convert the file to UTF-8") from None
    if not text.strip():
        raise InvalidOption(f"{path} is empty: give a text")
    ids = tokenizer.encode(text)
    starts = range(0, max(len(ids) - 1, 1), longest)
    return [Example(tuple(piece), (True,) * len(piece)) for piece in (ids[at : at + longest] for at in starts)]
