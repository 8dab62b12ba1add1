"""Attention of a few new tokens a row to a long cache: see `op`."""
