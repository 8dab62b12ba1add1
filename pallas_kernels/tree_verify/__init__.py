"""Attention of a draft tree to a long cache: see `op`."""
