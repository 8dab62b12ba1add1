"""What langchain-openai gets from a running server: ``python -m tests.server.clients.langchain URL``.

It needs ``pip install langchain-openai``, and a model whose chat template knows tools::

    python -m tests.server.clients.tool_template > template.jinja
    jaxinfer serve --chat-template template.jinja
"""

import asyncio
import sys
from collections.abc import Callable
from typing import Any, Literal

from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

MESSAGES = [SystemMessage("You are a helpful assistant."), HumanMessage("What is the capital of France?")]
CHECKS: list[Callable[[str, str], None]] = []


class City(BaseModel):
    """A city."""

    name: str = Field(description="What it is called", max_length=20)
    size: Literal["small", "large"]
    has_river: bool


@tool
def weather(city: str, unit: Literal["celsius", "fahrenheit"] = "celsius") -> str:
    """Tell the weather of a city."""
    return f"It is 20 degrees {unit} in {city}."


def check(body: Callable[[str, str], None]) -> Callable[[str, str], None]:
    CHECKS.append(body)
    return body


def chat_model(address: str, model: str, **options: Any) -> ChatOpenAI:
    fields = {"temperature": 0, "max_tokens": 60, **options}
    return ChatOpenAI(base_url=f"{address}/v1", api_key="none", model=model, max_retries=0, **fields)


@check
def invoke(address: str, model: str) -> None:
    """Whole answers say what OpenAI's do; the same comes again with the same seed."""
    chat = chat_model(address, model)
    answer = chat.invoke(MESSAGES)
    assert isinstance(answer, AIMessage)
    assert "Paris" in answer.text, answer
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    assert answer.response_metadata["model_name"] == model
    assert answer.response_metadata["system_fingerprint"].startswith("jaxinfer-")
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0
    drawn = [chat_model(address, model, temperature=1.0, seed=5).invoke(MESSAGES).text for _ in range(2)]
    assert drawn[0] == drawn[1]
    told = chat.bind(logprobs=True, top_logprobs=2).invoke(MESSAGES)
    assert "".join(one["token"] for one in told.response_metadata["logprobs"]["content"]) == told.text


@check
def stream(address: str, model: str) -> None:
    """A stream joins to the whole answer, its usage included."""
    whole = chat_model(address, model).invoke(MESSAGES)
    chunks = list(chat_model(address, model, stream_usage=True).stream(MESSAGES))
    assert len(chunks) > 3
    joined = _joined(chunks)
    assert joined.text == whole.text
    assert joined.usage_metadata is not None
    assert joined.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    assert joined.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]


@check
def async_and_batch(address: str, model: str) -> None:
    """Requests at the same time get what they get alone."""
    chat = chat_model(address, model)
    whole = chat.invoke(MESSAGES).text

    async def ask() -> tuple[list[AIMessage], str]:
        chunks = [chunk async for chunk in chat.astream(MESSAGES)]
        return await chat.abatch([MESSAGES] * 3), _joined(chunks).text

    answers, streamed = asyncio.run(ask())
    assert [one.text for one in answers] == [whole] * 3
    assert streamed == whole
    assert [one.text for one in chat.batch([MESSAGES] * 2)] == [whole] * 2


@check
def tools(address: str, model: str) -> None:
    """Calls that must come do come, at once and as a stream, and their results can be sent back."""
    chat = chat_model(address, model, max_tokens=100)
    for choice in ("any", "weather"):
        bound = chat.bind_tools([weather], tool_choice=choice, parallel_tool_calls=False)
        answer = bound.invoke("How warm is it in Paris?")
        (call,) = answer.tool_calls
        assert call["name"] == "weather"
        assert isinstance(call["args"]["city"], str)
        assert answer.invalid_tool_calls == []
        assert answer.response_metadata["finish_reason"] == "tool_calls"
        joined = _joined(list(bound.stream("How warm is it in Paris?")))
        assert [(one["name"], one["args"]) for one in joined.tool_calls] == [(call["name"], call["args"])]
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    conversation = [HumanMessage("How warm is it in Paris?"), answer, result]
    assert chat.bind_tools([weather], tool_choice="none").invoke(conversation).tool_calls == []
    assert isinstance(chat.bind_tools([weather]).invoke(conversation).text, str)


@check
def structured_output(address: str, model: str) -> None:
    """An answer is an object of the class that is asked for, by a schema and by a call."""
    chat = chat_model(address, model, max_tokens=100)
    for method in ("json_schema", "function_calling"):
        for strict in (None, True):
            form = chat.with_structured_output(City, method=method, strict=strict, include_raw=True)
            found = form.invoke("Describe Paris as a city.")
            assert found["parsing_error"] is None, found
            assert isinstance(found["parsed"], City)
        streamed = list(chat.with_structured_output(City, method=method).stream("Describe Paris as a city."))
        assert isinstance(streamed[-1], City)
    free = chat.with_structured_output(None, method="json_mode")
    assert isinstance(free.invoke("Describe Paris as a city."), dict)


@check
def responses(address: str, model: str) -> None:
    """The newer endpoint, too."""
    chat = chat_model(address, model, use_responses_api=True)
    answer = chat.invoke(MESSAGES)
    assert answer.text == chat_model(address, model).invoke(MESSAGES).text
    assert _joined(list(chat.stream(MESSAGES))).text == answer.text
    bound = chat_model(address, model, use_responses_api=True, max_tokens=100).bind_tools([weather], tool_choice="any")
    assert bound.invoke("How warm is it in Paris?").tool_calls[0]["name"] == "weather"


@check
def completions_and_embeddings(address: str, model: str) -> None:
    """The older endpoint continues texts; equal texts have equal embeddings."""
    options: dict[str, Any] = {"base_url": f"{address}/v1", "api_key": "none", "model": model, "max_retries": 0}
    older = OpenAI(**options, temperature=0, max_tokens=8)
    assert older.invoke("The capital of France is").strip()
    assert "".join(older.stream("The capital of France is")) == older.invoke("The capital of France is")
    embed = OpenAIEmbeddings(**options, check_embedding_ctx_length=False)
    one, same, other = embed.embed_documents(["a cat", "a cat", "the stock market"])
    assert one == same != other
    assert one == embed.embed_query("a cat")


def _joined(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined = joined + chunk
    return joined


def main(address: str, *names: str) -> int:
    """Run the checks of some names, all if none is given; return how many failed."""
    import openai

    model = openai.OpenAI(base_url=f"{address}/v1", api_key="none").models.list().data[0].id
    failed = 0
    for body in CHECKS:
        if names and body.__name__ not in names:
            continue
        try:
            body(address, model)
            print(f"passed {body.__name__}")
        except Exception as error:
            failed += 1
            print(f"FAILED {body.__name__}: {type(error).__name__}: {error}")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1].rstrip("/"), *sys.argv[2:]))
