"""Writing new tokens into a cache where it lies: see `op`."""
