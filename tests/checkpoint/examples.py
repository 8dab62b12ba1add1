"""How many examples a test that draws damage tries."""

import pytest


def examples(ordinary: int, wide: int) -> pytest.MarkDecorator:
    """Give a test ``max_examples``: so many in the ordinary run, and in the wide one more, these among them."""
    return pytest.mark.parametrize("max_examples", [ordinary, pytest.param(wide, marks=pytest.mark.slow)])
