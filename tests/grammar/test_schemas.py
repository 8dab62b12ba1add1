"""Every answer that ends by itself is valid by its JSON schema, with drafts and without; the rest is refused.

Validity is what the package ``jsonschema`` says.
"""

import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxinfer import GenerationResult, LanguageModel, SamplingParams
from jaxinfer.errors import InvalidOption
from jaxinfer.grammar import Grammar, compiling
from jaxinfer.grammar.automaton import DEAD, Automaton, automaton, smallest, trimmed
from jaxinfer.grammar.schema import pattern_of
from jaxinfer.grammar.schema.numbers import Bound, integers, numbers
from tests.grammar.schemas import draw_schemas
from tests.toys import END, encode_bytes

# What ends a part of a text comes more often, or texts would be long.
BIAS = {encode_bytes(sign)[0]: 5.0 for sign in '"}]'} | {encode_bytes(",")[0]: 2.0, END: 5.0}
NODE = {"type": "object", "properties": {"v": {"type": "integer"}, "k": {"$ref": "#/$defs/node"}}, "required": ["v"]}
TAGGED = [
    {"type": "object", "properties": {"t": {"const": "a"}, "x": {"type": "number"}}, "required": ["t", "x"]},
    {"type": "object", "properties": {"t": {"enum": ["b", "c"]}}, "required": ["t"]},
]
# Each once went wrong, or might.
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "integer", "minimum": -17, "exclusiveMaximum": 1205},
    {"type": "number", "exclusiveMinimum": 0.25, "maximum": 0.5},
    {"type": "number", "exclusiveMaximum": 0, "minimum": -1.5},
    {"type": "string", "pattern": '^"[^a]\\\\$'},
    {"type": "string", "pattern": r"^(\d|\n|[\s\W]){1,2}$"},
    {"properties": {'a "b"': {}, "\\": True, "c": {"maxLength": 2}}, "required": ["c", "unnamed"]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"type": "number", "maximum": 5}]},
    {"type": "object", "properties": {"a": {"type": "null"}}, "anyOf": [{"required": ["a"]}, {"maxProperties": 1}]},
    {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    {"oneOf": TAGGED},
    {"type": "array", "prefixItems": [{"type": "null"}, False, {}], "items": {"type": "integer"}},
    {"type": "object", "additionalProperties": {"format": "date", "type": "string"}, "maxProperties": 2},
    {
        "type": "array",
        "items": {"$ref": "#/$defs/a%20b~1c"},
        "maxItems": 3,
        "$defs": {"a b/c": {"type": "string", "format": "ipv6"}},
    },
    {"type": ["string", "number"], "enum": ["a\n", 1, 2.5, None, True]},
)
# (schema, where and why it is refused)
REFUSED: tuple[tuple[Any, str], ...] = (
    ({"not": {}}, "not: this keyword is not implemented"),
    ({"properties": {"a": {"items": {"if": {}}}}}, "properties.a.items.if: "),
    ({"type": "integer", "multipleOf": 2}, "multipleOf: only whole numbers"),
    ({"type": "integer", "minimum": 10**16}, "minimum: bounds beyond"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "no text follows it"),
    ({"type": "integer", "minimum": "3"}, "minimum: '3' is not a number"),
    ({"type": "string", "maxLength": -1}, "maxLength: -1 is not"),
    ({"type": "string", "pattern": "a", "maxLength": 2}, "pattern: one of"),
    ({"type": "string", "pattern": "^a|b"}, "pattern: an anchor holds"),
    ({"type": "string", "pattern": "a$b"}, "pattern: anchors are"),
    ({"type": "string", "pattern": "(?=a)"}, "pattern: groups that look around"),
    ({"type": "string", "pattern": r"(a)\1"}, r"pattern: \\1 is not"),
    ({"type": "string", "pattern": "a)(b"}, "pattern: a group is closed"),
    ({"type": "string", "pattern": "[a"}, "pattern: it ends too early"),
    ({"type": "string", "format": "frog"}, "format: 'frog' is not one of"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems: "),
    ({"type": "array", "items": [{}]}, "items: is a list"),
    ({"type": "array", "minItems": 2, "maxItems": 1}, "no text follows it"),
    ({"enum": []}, "no text follows it"),
    ({"enum": ["abc"], "minLength": 2}, "minLength: is not implemented beside"),
    ({"type": "object", "minProperties": 2}, "minProperties: "),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}, "minProperties: "),
    ({"required": ["a"], "additionalProperties": False}, "no text follows it"),
    ({"properties": []}, r"properties: \[\] is not an object"),
    ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "pattern: stands twice"),
    ({"properties": {"a": {}}, "allOf": [{"additionalProperties": False}]}, "additionalProperties forbids"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf: one value may follow two"),
    ({"oneOf": [TAGGED[1], {**TAGGED[1], "required": []}]}, "oneOf: one value may follow two"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "leads back to itself"),
    ({"$ref": "other.json"}, "other documents"),
    ({"$ref": "#/$defs/a"}, "is not in the schema"),
    ({"$ref": "#", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "leads back to itself"),
    ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no text follows it"),
    ({"type": "frog"}, "type: 'frog' is not one of"),
    ({"properties": {"a\n" * 300: 3}}, "3 is not a schema"),
)  # fmt: skip


@pytest.mark.parametrize("given", REFUSED, ids=lambda given: json.dumps(given[0])[:60])
def test_what_is_not_followed_is_refused_by_its_place(given: tuple[Any, str]) -> None:
    schema, reason = given
    with pytest.raises(InvalidOption, match=f"the JSON schema cannot be followed: .*{reason}") as caught:
        pattern_of(schema)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_schemas_that_grow_without_end_are_refused_soon() -> None:
    many: dict[str, Any] = {str(one): {"$ref": f"#/$defs/{one}"} for one in range(20)}
    circle = {"$defs": {str(one): {"properties": many} for one in range(20)}, "$ref": "#/$defs/0"}
    deep: dict[str, Any] = {}
    for _ in range(2000):
        deep = {"items": deep}
    wide = {"$ref": "#/$defs/0", "$defs": {"20": {"type": "string"}}}
    wide["$defs"] |= {str(one): {"prefixItems": [{"$ref": f"#/$defs/{one + 1}"}] * 2} for one in range(20)}
    for schema in (circle, deep, wide):
        with pytest.raises(InvalidOption, match=r"too large|too deeply"):
            pattern_of(schema)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(low=st.none() | st.integers(-3000, 3000), width=st.none() | st.integers(0, 3000), value=st.integers(-9999, 9999))
@example(low=0, width=0, value=0)
@example(low=-9, width=109, value=100)
def test_integers_are_those_between_their_bounds(low: int | None, width: int | None, value: int) -> None:
    high = None if width is None else (low or 0) + width
    pattern = integers(low, high)
    assert pattern is not None
    for one in {value, *(bound + near for bound in (low, high) if bound is not None for near in (-1, 0, 1))}:
        within = (low is None or one >= low) and (high is None or one <= high)
        assert (re.fullmatch(pattern, str(one)) is not None) == within


HUNDREDTHS = st.integers(-1200, 1200).map(lambda number: Decimal(number) / 100)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.none() | HUNDREDTHS, st.none() | HUNDREDTHS, st.booleans(), st.booleans(), HUNDREDTHS, st.integers(0, 2))
def test_numbers_are_those_between_their_bounds(
    low: Decimal | None, high: Decimal | None, low_open: bool, high_open: bool, value: Decimal, zeros: int
) -> None:
    pattern = numbers(low if low is None else Bound(low, low_open), high if high is None else Bound(high, high_open))
    small = Decimal("0.0001")
    for one in {value, *(bound + near for bound in (low, high) if bound is not None for near in (-small, 0, small))}:
        above = low is None or (one > low if low_open else one >= low)
        within = above and (high is None or (one < high if high_open else one <= high))
        text = f"{one + 0:f}" + (("" if "." in f"{one:f}" else ".0") + "0" * zeros if zeros else "")
        assert (pattern is not None and re.fullmatch(pattern, text) is not None) == within, text


def validate(text: str, schema: Mapping[str, Any]) -> None:
    value = json.loads(text, parse_constant=pytest.fail)
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(value)


def walk(found: Automaton, rng: np.random.Generator) -> str | None:
    """Return a text of an automaton, None for one that would be long."""
    text, state = b"", 0
    while len(text) < 1000:
        if found.ends_N[state] and (rng.random() < 0.3 or (found.next_NB[state] == DEAD).all()):
            return text.decode()
        may = np.flatnonzero(found.next_NB[state] != DEAD)
        weights = np.where(np.isin(may, [*b'"]},']), 20.0, 1.0)
        byte = int(rng.choice(may, p=weights / weights.sum()))
        text, state = text + bytes([byte]), int(found.next_NB[state, byte])
    return None


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
def test_every_way_through_a_schema_is_valid(schema: dict[str, Any]) -> None:
    arrays = compiling._compiled(pattern_of(schema))
    found = smallest(trimmed(Automaton(arrays["next_NB"], arrays["ends_N"])))
    rng = np.random.default_rng(0)
    texts = [text for _ in range(40) if (text := walk(found, rng)) is not None]
    assert len(texts) > 10
    for text in texts:
        validate(text, schema)


def answers(lm: LanguageModel, schemas: list[dict[str, Any]], strategy: str) -> list[GenerationResult]:
    samplings = [
        SamplingParams(
            grammar=Grammar.json_schema(schema), temperature=0.9, seed=number, logit_bias=BIAS, logprobs=True
        )
        for number, schema in enumerate(schemas)
    ]
    return lm.generate(
        ["The old"] * len(schemas),
        max_new_tokens=150,
        sampling=samplings,
        strategy=strategy or "autoregressive",
        batch_size=8,
    )


def check_answers(lm: LanguageModel, schemas: list[dict[str, Any]]) -> None:
    """Check that answers of a model are valid and the same in every bit with drafts; most must end by themselves."""
    plain, drafted = (answers(lm, schemas, strategy) for strategy in ("autoregressive", "prompt_lookup"))
    for schema, one, other in zip(schemas, plain, drafted):
        assert one.tokens == other.tokens
        assert [value.hex() for value in one.logprobs] == [value.hex() for value in other.logprobs]
        if one.finish_reason == "stop":
            validate(one.text, schema)
    ended = sum(one.finish_reason == "stop" for one in plain)
    assert ended >= math.ceil(0.9 * len(schemas)), f"{ended} of {len(schemas)} answers ended"
    assert sum(one.stats.accepted for one in drafted) > 0


@pytest.mark.slow
def test_answers_are_valid_and_no_draft_changes_a_bit(trained_model: LanguageModel) -> None:
    check_answers(trained_model, [*SCHEMAS[7:10], *SCHEMAS[:2]])


@pytest.mark.parametrize(
    "part",
    [pytest.param(20, id="some", marks=pytest.mark.slow), pytest.param(1, id="all", marks=pytest.mark.exhaustive)],
)
def test_two_hundred_schemas(trained_model: LanguageModel, part: int) -> None:
    """Nearly all are followed; those that are not ask for what is known to be refused.

    The wide run draws one in ``part`` of them, of which a model answers one in five.
    """
    drawn, kept, refused = draw_schemas(200 // part), [], []
    rng = np.random.default_rng(0)
    for schema in drawn:
        try:
            pattern = pattern_of(schema)
        except InvalidOption as error:
            refused.append(str(error))
            continue
        kept.append((len(pattern), json.dumps(schema)))
        found = automaton(Grammar.json_schema(schema))
        for text in filter(None, (walk(found, rng) for _ in range(20))):
            validate(text, schema)
    known = "multipleOf: only|pattern: one of|oneOf: one value|no text follows it"
    assert [reason for reason in refused if not re.search(known, reason)] == []
    assert len(kept) >= 0.75 * len(drawn), refused
    # Those of like size beside each other: fewer programs are compiled.
    check_answers(trained_model, [json.loads(text) for _, text in sorted(kept)[::part]])
