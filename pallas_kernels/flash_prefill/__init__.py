"""Causal attention of a prompt, or of a chunk of one, to a cache."""
