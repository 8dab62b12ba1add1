"""JSON schemas as regular expressions over the JSON texts that they allow."""

from jaxinfer.grammar.schema.translation import pattern_of

__all__ = ["pattern_of"]
