"""The formats in which models write calls: which one a model has, how it is read, and its texts as a grammar."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.grammar.grammar import Grammar
from jaxinfer.server.tools.readers import (
    HERMES_CLOSE,
    HERMES_OPEN,
    LLAMA_NEXT,
    LLAMA_TAG,
    MISTRAL_ARGUMENTS,
    MISTRAL_ID,
    MISTRAL_OPEN,
    Reader,
    read_hermes,
    read_llama,
    read_mistral,
)
from jaxinfer.tokenizers import Tokenizer

_ANY_ARGUMENTS = {"type": "object"}


@dataclass(frozen=True)
class Function:
    """A function that a model may call; ``parameters`` is the JSON schema of its arguments, an object."""

    name: str
    parameters: Mapping[str, Any]

    @property
    def arguments(self) -> Grammar:
        """The JSON texts of its arguments."""
        return Grammar.json_schema(self.parameters)


@dataclass(frozen=True)
class ToolFormat:
    """A way to write calls.

    A text of calls is ``opening``, one of ``firsts``, calls with ``between``, and ``last``; a call is ``before`` its
    name, ``amid``, its arguments and ``after``. ``opening`` may be a special token, which no grammar can ask for: it is
    put at the end of the prompt. ``marks`` may be special tokens too, whose text is not part of the output. A template
    that has all of ``known_by`` and nothing of ``not_by`` is of this format.
    """

    name: str
    read: Reader
    known_by: tuple[str, ...]
    not_by: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    opening: str = ""
    firsts: tuple[str, ...] = ()
    before: str = ""
    amid: str = ""
    after: str = ""
    between: str = ""
    last: str = ""
    id_length: int = 24

    def grammar(self, functions: Sequence[Function], *, several: bool) -> Grammar:
        """Return the texts after ``opening`` that are a call of one of the functions, or ``several`` calls."""
        calls = [
            Grammar.sequence(
                [Grammar.choice([f"{self.before}{one.name}{self.amid}"]), one.arguments, *_literal(self.after)]
            )
            for one in functions
        ]
        call = Grammar.any_of(calls)
        whole = Grammar.repeated(call, Grammar.choice([self.between])) if several else call
        return Grammar.sequence([*_literal(*self.firsts), whole, *_literal(self.last)])

    def new_id(self) -> str:
        """Return an id of a call, of letters and digits where a template asks for nothing else."""
        text = secrets.token_hex(self.id_length)[: self.id_length]
        return text if self.id_length < len("call_") + 8 else f"call_{text}"

    def hidden(self, tokenizer: Tokenizer) -> dict[int, str]:
        """Return the marks that are special tokens, by their ids."""
        found = {}
        for mark in self.marks:
            # Some tokenizers write a space before it.
            for token in tokenizer.encode(mark, add_special_tokens=False)[-1:]:
                is_mark = tokenizer.decode([token], skip_special_tokens=False).strip() == mark
                if is_mark and not tokenizer.decode([token]):
                    found[token] = mark
        return found


FORMATS = (
    ToolFormat(
        "hermes",
        read_hermes,
        known_by=(HERMES_OPEN, "arguments"),
        not_by=("<function=", "<arg_key>"),
        marks=(HERMES_OPEN, HERMES_CLOSE),
        before=f'{HERMES_OPEN}\n{{"name": "',
        amid='", "arguments": ',
        after=f"}}\n{HERMES_CLOSE}",
        between="\n",
    ),
    ToolFormat(
        "llama3",
        read_llama,
        known_by=("<|start_header_id|>", '"parameters": '),
        marks=(LLAMA_TAG,),
        before='{"name": "',
        amid='", "parameters": ',
        after="}",
        between=f"{LLAMA_NEXT} ",
    ),
    ToolFormat(
        "mistral",
        read_mistral,
        known_by=(MISTRAL_OPEN,),
        not_by=(MISTRAL_ARGUMENTS,),
        marks=(MISTRAL_OPEN,),
        opening=MISTRAL_OPEN,
        firsts=("[", " ["),
        before='{"name": "',
        amid='", "arguments": ',
        after="}",
        between=", ",
        last="]",
        id_length=9,
    ),
    ToolFormat(
        "mistral-named",
        read_mistral,
        known_by=(MISTRAL_OPEN, MISTRAL_ARGUMENTS),
        marks=(MISTRAL_OPEN, MISTRAL_ID, MISTRAL_ARGUMENTS),
        opening=MISTRAL_OPEN,
        amid=MISTRAL_ARGUMENTS,
        between=MISTRAL_OPEN,
        id_length=9,
    ),
)
BY_NAME = {one.name: one for one in FORMATS}
# The name for that which the chat template is for.
AUTO = "auto"


def find_format(template: str) -> ToolFormat | None:
    """Return the format that a chat template is for; None if it is none of these."""
    for one in FORMATS:
        if all(text in template for text in one.known_by) and not any(text in template for text in one.not_by):
            return one
    return None


def _literal(*texts: str) -> list[Grammar]:
    """Return a grammar of some texts; none if there is nothing to say."""
    return [Grammar.choice(texts)] if any(texts) else []
