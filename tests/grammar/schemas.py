"""JSON schemas as people write them, drawn by hypothesis; some of them ask for what is refused."""

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

NAMES = ("id", "name", 'a "b"', "größe", "x.y", "tags")
PATTERNS = ("^[a-z]{2,4}$", r"^\d{1,3}-[A-F]$", "^(yes|no)$", "ab+", r"^[^x]\W?$", r'^"\\.$')
WHOLE = st.integers(-2000, 2000)
# Hundredths, and their neighbours of a whole number.
FRACTION = st.integers(-50_000, 50_000).map(lambda number: number / 100)
VALUES = st.none() | st.booleans() | WHOLE | FRACTION | st.text(max_size=4) | st.lists(WHOLE, max_size=2)


def _bounds(values: Any) -> Any:
    """Draw bounds between which there are values."""
    pair = st.tuples(values, values, st.booleans(), st.booleans()).filter(lambda four: abs(four[0] - four[1]) > 2)

    def named(four: Any) -> dict[str, Any]:
        low, high = sorted(four[:2])
        return {"exclusiveMinimum" if four[2] else "minimum": low, "exclusiveMaximum" if four[3] else "maximum": high}

    return st.tuples(pair.map(named), st.sets(st.integers(0, 1))).map(
        lambda drawn: dict(one for index, one in enumerate(drawn[0].items()) if index not in drawn[1])
    )


def _sizes(least: str, most: str, highest: int) -> Any:
    pairs = st.tuples(st.integers(0, 2), st.integers(2, highest))
    return pairs.map(lambda pair: {least: pair[0], most: pair[1]})


LEAVES = st.one_of(
    _bounds(WHOLE).map(lambda bounds: {"type": "integer", **bounds}),
    _bounds(FRACTION).map(lambda bounds: {"type": "number", **bounds}),
    _sizes("minLength", "maxLength", 6).map(lambda sizes: {"type": "string", **sizes}),
    st.sampled_from(PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern}),
    st.sampled_from(("date", "uuid", "ipv4")).map(lambda name: {"type": "string", "format": name}),
    st.lists(VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    VALUES.map(lambda value: {"const": value}),
    st.sampled_from(({"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}, {"type": "string"})),
    st.sampled_from((
        {"type": "string", "pattern": "^a", "maxLength": 3},
        {"type": "integer", "multipleOf": 3},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    )),
)  # fmt: skip


@st.composite
def _objects(draw: Any, values: Any) -> dict[str, Any]:
    properties = draw(st.dictionaries(st.sampled_from(NAMES), values, max_size=4))
    required = [name for name in properties if draw(st.booleans())]
    made = {"type": "object", "properties": properties, "required": required}
    return made | draw(st.sampled_from(({}, {"additionalProperties": False}, {"title": "x", "description": "y"})))


def _above(values: Any) -> Any:
    """Draw what is made of other schemas."""
    return st.one_of(
        _objects(values),
        _objects(values),
        st.tuples(values, _sizes("minItems", "maxItems", 4)).map(
            lambda pair: {"type": "array", "items": pair[0], **pair[1]}
        ),
        st.lists(values, min_size=1, max_size=3).map(lambda several: {"anyOf": several}),
        st.lists(values, min_size=1, max_size=2).map(lambda several: {"type": "array", "prefixItems": several}),
        values.map(lambda one: {"$defs": {"part": one}, "$ref": "#/$defs/part"}),
        values.map(lambda one: {"allOf": [one], "description": "z"}),
    )


# Nested up to three levels.
SCHEMAS = LEAVES | _above(LEAVES) | _objects(_above(LEAVES)) | _objects(LEAVES | _objects(LEAVES | _above(LEAVES)))


def draw_schemas(count: int) -> list[dict[str, Any]]:
    """Return schemas, the same ones in every run; references are only at their top, where they lead somewhere."""
    found: list[dict[str, Any]] = []

    @settings(
        derandomize=True, max_examples=2 * count, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(SCHEMAS)
    def take(schema: dict[str, Any]) -> None:
        if schema not in found and _without_inner_references(schema, True):
            found.append(schema)

    take()
    assert len(found) >= count
    return found[:count]


def _without_inner_references(schema: Any, is_top: bool) -> bool:
    if isinstance(schema, list):
        return all(_without_inner_references(one, False) for one in schema)
    if not isinstance(schema, dict):
        return True
    return (is_top or "$ref" not in schema) and all(_without_inner_references(one, False) for one in schema.values())
