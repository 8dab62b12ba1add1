"""Runs templates of strangers: Jinja's sandbox, and a budget of steps, characters and time."""

from jaxinfer.tokenizers.sandbox.budget import budget_for
from jaxinfer.tokenizers.sandbox.environment import make_environment

__all__ = ["budget_for", "make_environment"]
