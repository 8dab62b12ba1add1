"""Tokenizers, chat templates and the incremental decoding of streams."""

from jaxinfer.tokenizers.chat import encode_chat, read_chat_template, use_chat_template
from jaxinfer.tokenizers.chat_template import ChatTemplate
from jaxinfer.tokenizers.load import load_tokenizer
from jaxinfer.tokenizers.stream import TextStream
from jaxinfer.tokenizers.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "TextStream",
    "Tokenizer",
    "encode_chat",
    "load_tokenizer",
    "read_chat_template",
    "use_chat_template",
]
