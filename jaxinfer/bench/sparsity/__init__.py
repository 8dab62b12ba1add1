"""How sparse the activations of a model are, and what leaving features out saves."""
