"""Attention of a few new tokens per row to a ring of slots and to sinks, the sequence's first tokens: see `op`."""
