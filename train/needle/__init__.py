"""A tiny model that finds facts in long texts."""
