"""A value head for tree search: what a checker will say of a model's answer, told from its beginning."""
