"""Attention of a few new tokens a row to a ring of slots and to the text's first tokens: see `op`."""
