"""Causal attention of a chunk of a prompt to pages."""
