"""Attention of a few new tokens a row to pages that a table names: see `op`."""
