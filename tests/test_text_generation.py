"""A row's output as it comes: pieces have the tokens and texts of the result, however windows cut them."""

import itertools
import json
from dataclasses import dataclass, field

import pytest

from jaxinfer.decoding.batch import Request
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.text_generation import TextRequest, TextRow, add_details, start_row

END = 0


@dataclass
class Bytes:
    """A tokenizer with byte fallback, as Llama-2's: 1 is a line's end, 10 to 13 an emoji's bytes; the others words."""

    words: dict[int, str] = field(default_factory=lambda: {2: "foo", 3: "bar", 5: "x"})
    byte_fallback_ids = frozenset({1, 10, 11, 12, 13})
    vocab_size, bos_token_id, eos_token_ids, chat_template = 16, None, (END,), None

    def encode(self, text, *, add_special_tokens=True):
        return [token for word in text.split() for token, own in self.words.items() if own == word]

    def decode(self, ids, *, skip_special_tokens=True):
        text = bytearray()
        for token in ids:
            text += b"\n" if token == 1 else bytes(["🙂".encode()[token - 10]]) if token >= 10 else b""
            text += self.words.get(token, "").encode()
        return text.decode(errors="replace")


def run(tokens, cuts, stop=("\n",)):
    """Give tokens in windows that begin at ``cuts``; return all that pieces told, and the row."""
    request = Request([5], 64, SamplingParams(stop=stop, logprobs=True, ignore_eos=False), 0)
    row = start_row(TextRequest("x", request), (END,), Bytes())
    told, texts, text, logprobs = [], [], "", []
    bounds = [0, *cuts, len(tokens)]
    numbers = [-float(at) for at in range(len(tokens))]
    for start, end in itertools.pairwise(bounds):
        is_last = end == len(tokens) and tokens[-1] == END
        piece = add_details(row.take(list(tokens[start:end]), is_last), row, [False] * len(tokens), numbers)
        told += piece.tokens
        texts += piece.texts
        text += piece.text
        logprobs += piece.logprobs
    return told, texts, text, logprobs, row


TEXTS = [
    (2, 1, 1, 1, 3),
    (2, 1, 1, 3, END),
    (10, 11, 12, 13, 1, 3),
    (2, 3, 5, END),
    (2, 10, 11, END),
    (1, 1, 1, 1, END),
]


@pytest.mark.parametrize("tokens", TEXTS, ids=json.dumps)
@pytest.mark.parametrize("stop", [("\n",), ("foo\n", "rx"), ()])
def test_pieces_are_those_of_the_result_wherever_windows_end(tokens, stop):
    whole = run(tokens, (), stop)
    for size in range(len(tokens)):
        for cuts in itertools.combinations(range(1, len(tokens)), size):
            told, texts, text, logprobs, row = run(tokens, cuts, stop)
            if row.is_over:
                assert told == row.tokens == whole[4].tokens
                assert "".join(texts) == text == whole[2] == row.stream.text
            assert len(texts) == len(told) == len(logprobs)
            assert logprobs == [-float(at) for at in range(len(told))]


def test_a_stop_string_amid_bytes_ends_the_text_there():
    told, texts, text, _, row = run((2, 1, 1, 1, 3), (1, 2, 3, 4))
    assert (told, texts, text) == ([2, 1], ["foo", ""], "foo")
    assert row.is_cut
    told, texts, text, _, _ = run((10, 11, 12, 13, 1, 3), (2,))
    assert (told, text) == ([10, 11, 12, 13, 1], "🙂")
    assert "".join(texts) == "🙂"


def test_without_stop_strings_tokens_are_told_as_they_come():
    row: TextRow = run((2, 1, 1), (), ())[4]
    assert row.num_told == 3
