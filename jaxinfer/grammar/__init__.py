"""Which texts a request may give: grammars as tables that a step reads on the device (``README.md``)."""

from jaxinfer.grammar.grammar import Grammar

__all__ = ["Grammar"]
