"""``jaxinfer chat``: a conversation in the terminal."""

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from jaxinfer.cli.arguments import (
    add_adapter_argument,
    add_generation_arguments,
    add_model_arguments,
    add_sampling_arguments,
    sampling_options,
)
from jaxinfer.cli.collection import without_collection
from jaxinfer.cli.output.pace_notice import pace_lines
from jaxinfer.cli.output.stats_table import stats_lines
from jaxinfer.errors import InvalidOption, InvalidTokenizer

if TYPE_CHECKING:
    from jaxinfer.language_model import LanguageModel
    from jaxinfer.sampling.params import SamplingParams

_QUIT = "/exit"
_PROMPT = "> "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``chat``."""
    parser.add_argument("--system", metavar="TEXT", help="system message at the start of the conversation")
    add_model_arguments(parser)
    add_adapter_argument(parser)
    add_generation_arguments(parser, max_new_tokens=512)
    add_sampling_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Answer line by line until /exit, the end of input, or Ctrl-C at the prompt; Ctrl-C in a reply stops the reply."""
    with without_collection():
        # Imported here: a mistake in the options is told before JAX is waited for.
        from jaxinfer.cli.loading import adapter_of, load_model
        from jaxinfer.decoding.registry import parse_strategy
        from jaxinfer.sampling.params import SamplingParams

        sampling = SamplingParams(**sampling_options(options))
        parse_strategy(options.strategy).num_results(sampling)
        model = load_model(options)
    if model.tokenizer.chat_template is None:
        raise InvalidTokenizer("this model has no chat template: use jaxinfer generate")
    conversation = Conversation(model, sampling, options, adapter_of(options))
    if sys.stdin is None:
        raise InvalidOption("standard input is closed: chat reads from it")
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):  # gives the prompt history and cursor keys; not on every system
            import readline  # noqa: F401
        print(f"{_QUIT} or Ctrl-D ends the conversation, Ctrl-C stops a reply.", file=sys.stderr)
    while True:
        try:
            line = input(_PROMPT) if is_terminal else _read_line()
        except (EOFError, KeyboardInterrupt):
            if is_terminal:
                print()
            return 0
        if line.strip() == _QUIT:
            return 0
        if line.strip():
            conversation.answer(line)


def _read_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


class Conversation:
    """What was said so far, and the replies to it."""

    def __init__(
        self,
        model: "LanguageModel",
        sampling: "SamplingParams",
        options: argparse.Namespace,
        adapter: str | None = None,
    ) -> None:
        self.messages: list[dict[str, str]] = []
        if options.system:
            self.messages.append({"role": "system", "content": options.system})
        self._num_fixed = len(self.messages)
        self._model, self._sampling, self._options, self._adapter = model, sampling, options, adapter

    def answer(self, text: str) -> None:
        """Print the reply to a message; a message that cannot be answered is told and forgotten."""
        self.messages.append({"role": "user", "content": text})
        try:
            prompt = self._fit()
        except InvalidOption as error:
            self.messages.pop()
            print(f"error: {error}", file=sys.stderr)
            return
        spoken: list[str] = []
        try:
            self._speak(prompt, spoken)
        except KeyboardInterrupt:
            print(flush=True)
        if spoken:
            self.messages.append({"role": "assistant", "content": "".join(spoken)})
        else:  # stopped before a word came: two questions in a row would break the template
            self.messages.pop()

    def _speak(self, prompt: list[int], spoken: list[str]) -> None:
        options, result = self._options, None
        choices = {"max_new_tokens": options.max_new_tokens, "sampling": self._sampling, "strategy": options.strategy}
        # From the second turn on, what was computed of the conversation serves the next.
        goes_on = any(message["role"] == "assistant" for message in self.messages)
        for piece in self._model.stream(prompt, reuse=goes_on, adapter=self._adapter, **choices):
            if piece.text:
                spoken.append(piece.text)
            print(piece.text, end="", flush=True)
            result = piece.result
        print(flush=True)
        if result is not None and result.finish_reason == "length":
            print(f"[cut at {len(result.tokens)} tokens]", file=sys.stderr)
        if result is not None and options.stats:
            print(*stats_lines([result.stats]), sep="\n", file=sys.stderr)
            asked = options.max_new_tokens, self._sampling, self._adapter
            for line in pace_lines(self._model, options.strategy, [prompt], [[result]], *asked):
                print(line, file=sys.stderr)

    def _fit(self) -> list[int]:
        """Return the conversation's ids, the oldest turns dropped where they leave no room for an answer."""
        max_len = self._model.max_len
        # Room for the whole answer, though never more than half of the context.
        most = max_len - min(self._options.max_new_tokens, max_len // 2)
        num_dropped = 0
        while len(ids := self._model.encode_chat(self.messages)) > most and len(self.messages) > self._num_fixed + 1:
            del self.messages[self._num_fixed : self._num_fixed + 2]
            num_dropped += 2
        if num_dropped:
            print(
                f"[the context of {max_len} tokens is full: {num_dropped} oldest messages forgotten]", file=sys.stderr
            )
        if len(ids) >= max_len:
            raise InvalidOption(
                f"this message has {len(ids)} tokens with its template, but the context has room for {max_len}: "
                "shorten it or raise --max-len"
            )
        return ids
