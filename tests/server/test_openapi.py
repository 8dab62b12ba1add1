"""The server describes itself: every field that it reads, and no other; nothing that is drawn from it makes it fail."""

import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import pytest
from starlette.routing import Route

from jaxinfer.server.api.errors import ApiError
from jaxinfer.server.api.fields import Probe
from jaxinfer.server.app import make_app
from jaxinfer.server.openapi.answers import ERRORS
from jaxinfer.server.openapi.requests import LEAVES, probes
from tests.server.harness import MODEL, Running
from tests.server.test_fields import LIMITS, MESSAGES, REFUSED, TAKEN, Bytes, read

POSTED = ("/v1/chat/completions", "/v1/responses", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize")
# What a request needs, beside the model; and what makes answers short, for it is the fields that are drawn.
LEAST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/embeddings": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
}
JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, 0.5, 1e308, -0.0, "", "x", "\ud800", "\0", "x" * 600, [], [[]],
    [None], ["x"] * 20, [5], [2**70], {}, {"": ""}, {"type": "x"}, {"type": "json_schema"}, {"1": 1}, [[5], "x"], [{}],
)  # fmt: skip
JSON = {"Content-Type": "application/json"}
TEXTS = ("", "x", "an old fox", "日本", '"\\', "\ud800", "\0", "<|end|>", "^[a-z]+$", "(", "x" * 150)


@pytest.fixture(scope="module")
def document(shared_server: Running) -> dict[str, Any]:
    return shared_server.get("/openapi.json").json()


def body_of(document: Mapping[str, Any], path: str) -> dict[str, Any]:
    return document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]


def leaves(probe: Probe, path: str = "") -> Iterator[str]:
    """Yield the places of the fields that readers check by themselves."""
    for name, schema in probe.taken.items():
        value = probe.get(name)
        inner = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, Probe)]
        for one in inner:
            yield from leaves(one, f"{path}{name}.")
        if not inner and not schema:
            yield f"{path}{name}"


def test_the_document_is_well_formed(document: dict[str, Any], server: Running) -> None:
    assert document["openapi"] == "3.1.0"
    routes = {route.path.replace(":path", "") for route in routes_of(server)}
    assert set(document["paths"]) == routes - {"/", "/page.css", "/page.js"}
    for schema in (*(body_of(document, path) for path in POSTED), *document["components"]["schemas"].values()):
        jsonschema.Draft202012Validator.check_schema(schema)
    text = json.dumps(document)
    for name in document["components"]["schemas"]:
        assert f'"#/components/schemas/{name}"' in text, name


def routes_of(server: Running) -> list[Route]:
    app: Any = make_app(server.served)
    return app._app.routes


def test_every_field_that_is_read_is_described(document: dict[str, Any]) -> None:
    asked = probes(LIMITS, Bytes(), 7)  # pyright: ignore[reportArgumentType]
    assert {leaf for probe in asked.values() for leaf in leaves(probe)} == set(LEAVES)
    for path, probe in asked.items():
        properties = body_of(document, path)["properties"]
        assert list(properties) == list(probe.taken), path
    for kind, path in (("chat", "/v1/chat/completions"), ("completion", "/v1/completions")):
        described = body_of(document, path)["properties"]
        assert set(TAKEN[kind]) <= set(described)
        refused = {name for name in REFUSED[kind] if name in described}
        assert {"audio", "store", "suffix"} & set(REFUSED[kind]) & refused
        assert all("Not implemented" in described[name].get("description", "") for name in refused - set(TAKEN[kind]))


def test_every_field_that_is_described_is_read(document: dict[str, Any], server: Running) -> None:
    for path in POSTED:
        for name in body_of(document, path)["properties"]:
            # Tools are for conversations.
            least = {"messages": MESSAGES} if path == "/tokenize" and "tool" in name else LEAST[path]
            error = server.post(path, {"model": MODEL, **least, name: {"no such": []}})
            assert error.status_code in (400, 404), name
            assert error.json()["error"]["code"] != "unknown_parameter" or error.json()["error"]["param"] != name


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_bounds_are_those_of_the_readers(document: dict[str, Any], kind: str) -> None:
    """Both are taken, and what is beyond is refused."""
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    beside = {"logprobs": True} if kind == "chat" else {"echo": True}
    count = 0
    for name, schema in body_of(document, path)["properties"].items():
        for keyword, step in (("minimum", -1), ("maximum", 1)):
            if keyword in schema:
                bound, count = schema[keyword], count + 1
                assert wrong_param(kind, {**beside, name: bound}) != name
                assert wrong_param(kind, {**beside, name: bound + step}) == name
    assert count > 20


def wrong_param(kind: str, fields: Mapping[str, Any]) -> str | None:
    """Return the field that a reader finds wrong."""
    try:
        read(kind, **fields)
    except ApiError as error:
        return error.param
    return None


def draw(schema: Mapping[str, Any], rng: random.Random) -> Any:
    """Return a value that follows a schema of the document."""
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "anyOf" in schema:
        return draw(rng.choice(schema["anyOf"]), rng)
    kinds = schema.get("type", ["string", "integer", "null"])
    kind = rng.choice(kinds) if isinstance(kinds, list) else kinds
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum", -5))
        high = min(schema.get("maximum", 5), 300)
        return (
            rng.randint(low, max(low, high))
            if kind == "integer"
            else rng.choice([high, rng.uniform(low, high) or high])
        )
    if kind == "string":
        return rng.choice(TEXTS)[: schema.get("maxLength", 999)] or "x"
    if kind == "array":
        count = rng.randint(schema.get("minItems", 0), min(schema.get("maxItems", 3), 3))
        return [draw(schema["items"], rng) for _ in range(count)]
    if kind == "object":
        needed = schema.get("required", [])
        named = {name: draw(one, rng) for name, one in schema.get("properties", {}).items() if name in needed}
        if "propertyNames" in schema:
            named |= {str(rng.randrange(300)): draw(schema["additionalProperties"], rng) for _ in range(2)}
        return named | {
            name: draw(one, rng) for name, one in schema.get("properties", {}).items() if rng.random() < 0.3
        }
    return {"boolean": rng.random() < 0.5, "null": None}[kind]


def draw_body(
    document: Mapping[str, Any], path: str, rng: random.Random, without: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return a request: some fields as they are described, some as they should not be."""
    schema = body_of(document, path)
    body = {"model": MODEL, **LEAST[path]}
    names = [name for name in schema["properties"] if name not in without]
    for name in rng.sample(names, min(rng.choice([0, 1, 2, 5]), len(names))):
        if name not in ("model", "max_tokens", "max_completion_tokens", "max_output_tokens") or rng.random() < 0.2:
            body[name] = rng.choice(JUNK) if rng.random() < 0.3 else draw(schema["properties"][name], rng)
    if type(body.get("n")) is int and body["n"] <= 128:
        body["n"] = min(body["n"], 3)  # many samples are slow, and no other than few
    if rng.random() < 0.05:
        body[rng.choice(["frog", "", "\0", "Model"])] = 1
    return body


def check(document: Mapping[str, Any], server: Running, path: str, body: dict[str, Any]) -> int:
    """Send a request; what comes back must be what the document says."""
    text = json.dumps(body, allow_nan=False).encode()
    answer = server.http.post(path, content=text, headers=JSON, timeout=120.0)
    said = document["paths"][path]["post"]["responses"].get(str(answer.status_code))
    assert said is not None, (body, answer.text)
    assert answer.status_code < 500, (body, answer.text)
    if answer.headers["content-type"] == "text/event-stream; charset=utf-8":
        last = answer.text.split("\n\n")[-2]
        ends = (
            ("event: response.completed", "event: response.incomplete") if path == "/v1/responses" else "data: [DONE]"
        )
        assert last.startswith(ends), (body, answer.text)
        return answer.status_code
    schema = said["content"]["application/json"]["schema"]
    jsonschema.validate(answer.json(), {**schema, "components": document["components"]})
    if answer.status_code == 200:
        jsonschema.validate(json.loads(text), body_of(document, path))
    return answer.status_code


def test_nothing_that_is_drawn_makes_it_fail(document: dict[str, Any], server: Running) -> None:
    """Without what needs programs of its own, which the wide run has."""
    own = ("response_format", "structured_outputs", "text", "logprobs", "echo")
    rng = random.Random(3)
    found = [check(document, server, path, draw_body(document, path, rng, own)) for _ in range(12) for path in POSTED]
    assert {200, 400} <= set(found) <= {200, *ERRORS}
    assert found.count(200) > 15


@pytest.mark.exhaustive
def test_nothing_of_hundreds_that_are_drawn_makes_it_fail(document: dict[str, Any], server: Running) -> None:
    rng = random.Random(4)
    found = [check(document, server, path, draw_body(document, path, rng)) for _ in range(120) for path in POSTED]
    assert found.count(200) > 150
    for path in ("/v1/models", f"/v1/models/{MODEL}", "/health", "/ready", "/openapi.json"):
        key = "/v1/models/{name}" if path.endswith(MODEL) else path
        schema = document["paths"][key]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate(server.get(path).json(), {**schema, "components": document["components"]})
