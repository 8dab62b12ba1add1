"""Python's search for garbage, which a command's start makes none of."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Look for no garbage meanwhile, nor later among what there is then: modules, a vocabulary.

    While modules are imported, looking for it takes a tenth of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
