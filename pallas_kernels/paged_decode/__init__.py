"""Attention of a few new tokens per row to pages given by a table: see `op`."""
