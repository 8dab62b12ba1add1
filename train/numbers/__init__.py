"""A tiny model that plays a game of arithmetic, not well."""
