"""Grammars: which texts a request may give, as tables that a step reads on the device (``jaxinfer/grammar/README.md``)."""

from jaxinfer.grammar.grammar import Grammar

__all__ = ["Grammar"]
