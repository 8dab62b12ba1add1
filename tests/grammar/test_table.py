"""A grammar's table lets through what the grammar has, token by token, and nothing else; every text can end."""

import io
import json
import re
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.errors import InvalidOption
from jaxinfer.grammar import Grammar, compiling
from jaxinfer.grammar.automaton import DEAD, automaton
from jaxinfer.grammar.table import NO_TOKEN, token_table

PATTERNS = ("ab|ac*", "(a|b)*abb", "a{2,3}(bc)?", "[^a]b?", "é+a|b", r"[)(\\]]?a|[^\n]{1,2}", "(ab?)+c?a?")
# Single bytes, tokens of several, a part of a character, one without text, and the token that ends a text.
TOKENS = [b"a", b"b", b"c", b"ab", b"bb", b"abb", b"\xc3", b"\xa9", None, None]
END = 9


def table_of(pattern: str):
    return token_table(automaton(Grammar.regex(pattern)), TOKENS, [END], len(TOKENS))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_matches_passes_in_any_tokens_and_nothing_else(pattern):
    table = table_of(pattern)
    for length in range(1, 5):
        for tokens in product(range(8), repeat=length):
            text = b"".join(TOKENS[token] or b"" for token in tokens)
            try:
                matches = re.fullmatch(pattern, text.decode()) is not None
            except UnicodeDecodeError:
                matches = False
            assert (table.after([*tokens, END]) != DEAD) == matches, text


@pytest.mark.parametrize("pattern", PATTERNS)
def test_from_every_state_a_text_can_end(pattern):
    table = table_of(pattern)
    lives = table.next_NC[:, table.classes_V[END]] != DEAD
    for _ in range(len(lives)):
        lives = lives | np.append(lives, False)[table.next_NC].any(axis=1)
    assert lives.all()
    assert table.next_NC[:, table.classes_V[8]].max() == DEAD


def test_a_token_that_must_come_is_known():
    table = table_of("cab?b")
    one, two = table.after([2]), table.after([2, 0])
    assert table.only_N[0] == 2
    assert table.only_N[one] == NO_TOKEN  # a, or ab, or abb
    assert table.only_N[two] == NO_TOKEN
    assert table.only_N[table.after([2, 5])] == END


def test_ways_that_the_tokens_cannot_end_are_closed():
    table = token_table(automaton(Grammar.regex("a|bc")), [b"a", b"b", None], [2], 3)
    assert table.after([1]) == DEAD
    with pytest.raises(InvalidOption, match="no text that the model's tokens"):
        token_table(automaton(Grammar.regex("bc")), [b"a", b"b", None], [2], 3)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "kind": {"enum": ["a", "b"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    },
    "required": ["name", "kind", "sizes"],
}


@settings(derandomize=True, max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_way_through_a_schema_is_json_of_it(schema_table, seed):
    rng, tokens, state = np.random.default_rng(seed), [], 0
    while not tokens or tokens[-1] != 256:
        # Quotes and brackets are drawn more often, or texts would be long.
        may = np.flatnonzero(schema_table.next_NC[state][schema_table.classes_V] != DEAD)
        weights = np.where(np.isin(may, [*b'"]},', 256]), 50.0, 1.0)
        tokens.append(int(rng.choice(may, p=weights / weights.sum())))
        state = schema_table.after([tokens[-1]], state)
        assert len(tokens) < 2000
    found = json.loads(bytes(tokens[:-1]))
    assert set(found) == {"name", "kind", "sizes"}
    assert len(found["name"]) <= 3
    assert found["kind"] in "ab"
    assert all(isinstance(size, int) for size in found["sizes"])


@pytest.fixture(scope="module")
def schema_table():
    spellings = [*(bytes([byte]) for byte in range(256)), None]
    return token_table(automaton(Grammar.json_schema(SCHEMA)), spellings, [256], 257)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Grammar.regex(""), "at least one character"),
        (lambda: Grammar.regex("x" * 100_001), "at most 100000"),
        (lambda: Grammar.regex("\ud800"), "not valid Unicode"),
        (lambda: Grammar.choice("yes"), "a list of texts"),
        (lambda: Grammar.any_of([]), "needs one part at least"),
        (lambda: automaton(Grammar.sequence([Grammar.regex("a)(b")])), "closed that is not open"),
        (lambda: Grammar.json_schema("[1]"), "is an object"),
        (lambda: Grammar.json_schema("{"), "is not JSON"),
        (lambda: Grammar.json_schema({"a": object()}), "is not JSON"),
        (lambda: automaton(Grammar.regex("((")), "cannot be compiled"),
        (lambda: automaton(Grammar.regex("a)(b")), "closed that is not open"),
        (lambda: automaton(Grammar.json_schema({"type": "frog"})), "type: 'frog' is not one of"),
    ],
)
def test_what_says_nothing_is_refused_in_one_line(make, reason):
    with pytest.raises(InvalidOption, match=reason) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_grammar_for_which_memory_does_not_suffice_is_called_too_large(monkeypatch):
    """The process that compiles it ends with 1, and says nothing."""

    def compiled(pattern):
        raise MemoryError

    monkeypatch.setattr(compiling, "_compiled", compiled)
    monkeypatch.setattr(compiling, "_bound", lambda: None)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"grammar": ["regex", "a"]}')))
    assert compiling.main() == 1


def test_choices_are_taken_literally():
    found = automaton(Grammar.choice(["a.b|", "~[é]"]))
    assert [bool(run(found, text)) for text in ("a.b|", "axb|", "~[é]", "a.b")] == [True, False, True, False]


def test_grammars_are_parts_of_others():
    """A part's alternatives stay its own, and a schema's references are found in it."""
    flag = Grammar.json_schema({"$ref": "#/$defs/x", "$defs": {"x": {"type": "boolean"}}})
    call = Grammar.sequence([Grammar.regex("f|g"), Grammar.choice(["(", "["]), Grammar.any_of([flag, flag])])
    found = automaton(Grammar.repeated(call, Grammar.choice([" | "])))
    texts = {"f(true": True, "g[false | f(true | f[true": True, "f": False, "(true": False, "f(true | ": False}
    assert {text: bool(run(found, text)) for text in texts} == texts


@pytest.mark.exhaustive
def test_what_would_take_all_memory_is_bounded():
    with pytest.raises(InvalidOption, match="too large"):
        automaton(Grammar.regex("(a|b)*a(a|b){22}"))


def run(found, text: str) -> bool:
    state = 0
    for byte in text.encode():
        if state != DEAD:
            state = int(found.next_NB[state, byte])
    return state != DEAD and found.ends_N[state]
