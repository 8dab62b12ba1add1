"""``/tokenize`` and ``/detokenize``: text to the model's ids and back."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.server.api.errors import wrong_field
from jaxinfer.server.api.fields import Fields, is_ids
from jaxinfer.server.api.messages import read_messages
from jaxinfer.server.api.sampling import Limits, check_model
from jaxinfer.server.api.tools import NO_CALLING, Calling, take_tools, template_options
from jaxinfer.tokenizers import Tokenizer


def answer_tokenize(
    body: Mapping[str, Any],
    limits: Limits,
    tokenizer: Tokenizer,
    encode_chat: Callable[..., list[int]],
    calling: Calling = NO_CALLING,
) -> dict[str, Any]:
    """Return the ids of a text, or of a conversation, with tools or without, in the model's template."""
    fields = Fields(body)
    _check_model_if_named(fields, limits)
    prompt, messages = fields.raw("prompt"), fields.raw("messages")
    if (prompt is None) == (messages is None):
        raise wrong_field("prompt", "give either prompt or messages", "missing_required_parameter")
    if messages is not None:
        conversation = read_messages(messages, "messages")
        tools = take_tools(fields, calling)
        fields.end()
        ids = encode_chat(conversation, **template_options(tools))
    else:
        text = fields.text("prompt")
        add_special_tokens = fields.flag("add_special_tokens", True)
        fields.end()
        ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return {"count": len(ids), "max_model_len": limits.longest_text, "tokens": list(ids)}


def answer_detokenize(body: Mapping[str, Any], limits: Limits, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the text of ids."""
    fields = Fields(body)
    _check_model_if_named(fields, limits)
    ids = fields.required("tokens")
    if ids != [] and not is_ids(ids):
        raise wrong_field("tokens", "is not a list of token ids", "invalid_type")
    wrong = next((token for token in ids if not 0 <= token < limits.vocab_size), None)
    if wrong is not None:
        raise wrong_field("tokens", f"an id is not in the vocabulary of {limits.vocab_size}")
    skip_special_tokens = fields.flag("skip_special_tokens", False)
    fields.end()
    return {"prompt": tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)}


def _check_model_if_named(fields: Fields, limits: Limits) -> None:
    if fields.raw("model") is not None:
        check_model(fields, limits)
