"""``jaxinfer chat`` remembers the conversation, forgets the oldest of it in time, and outlives an interrupt."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jaxinfer
from jaxinfer.cli import loading
from jaxinfer.results import StreamPiece
from tests.cli.conftest import Outcome
from tests.cli.test_generate import interrupt_after

Run = Callable[..., Outcome]
SHORT = ("--max-new-tokens", "10")


@pytest.fixture(scope="module")
def model(trained_folder: Path) -> jaxinfer.LanguageModel:
    return jaxinfer.load(trained_folder, max_len=128)


@pytest.fixture
def chat(run: Run, model: jaxinfer.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(loading, "load_model", lambda options: model)
    return lambda *arguments, lines: run("chat", *SHORT, *arguments, stdin="".join(f"{x}\n" for x in lines).encode())


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.slow
def test_replies_see_what_was_said_before(chat: Run, model: Any) -> None:
    system = {"role": "system", "content": "Rhyme."}
    first = model.chat([system, user("The fox")], max_new_tokens=10).text
    second = model.chat([system, user("The fox"), assistant(first), user("The owl")], max_new_tokens=10).text
    outcome = chat("--system", "Rhyme.", lines=["The fox", "", "The owl", "/exit", "never read"])
    assert outcome.code == 0
    assert outcome.out == f"{first}\n{second}\n"


def test_the_end_of_input_ends_the_conversation(chat: Run) -> None:
    assert chat(lines=[]) == Outcome(0, "", "")


def test_a_full_context_forgets_the_oldest_turns_and_says_so(
    chat: Run, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With replies of two letters, the second question does not fit beside the first, and the third does."""
    asked: list[list[int]] = []

    def stream(prompt: list[int], **options: object) -> list[StreamPiece]:
        asked.append(prompt)
        return [StreamPiece("ok", (1,))]

    monkeypatch.setattr(model, "stream", stream)
    first, second, third = "The quick fox " * 3, "The old heron " * 3, "A small otter"
    outcome = chat(lines=[first, second, third])
    expected = [[user(first)], [user(second)], [user(second), assistant("ok"), user(third)]]
    assert asked == [model.encode_chat(messages) for messages in expected]
    assert outcome.out == "ok\n" * 3
    assert outcome.err == "[the context of 128 tokens is full: 2 oldest messages forgotten]\n"


def test_a_message_beyond_the_context_is_one_line_and_the_conversation_goes_on(chat: Run, model: Any) -> None:
    outcome = chat(lines=["x" * 500, "The fox"])
    assert outcome.code == 0
    assert len(outcome.error_lines) == 1
    assert "128" in outcome.error_lines[0]
    assert outcome.out == model.chat([user("The fox")], max_new_tokens=10).text + "\n"


def test_an_interrupt_stops_the_reply_and_not_the_conversation(
    chat: Run, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []
    interrupted = interrupt_after("half a")

    def stream(prompt: list[int], **options: object) -> Any:
        asked.append(prompt)
        return interrupted()

    monkeypatch.setattr(model, "stream", stream)
    outcome = chat(lines=["one", "two"])
    assert outcome.code == 0
    assert outcome.out == "half a\nhalf a\n"
    assert asked[1] == model.encode_chat([user("one"), assistant("half a"), user("two")])
