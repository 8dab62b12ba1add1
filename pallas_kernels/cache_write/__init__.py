"""Writes new tokens to a cache in place: see `op`."""
