"""Attention of a few new tokens per row to a long cache: see `op`."""
