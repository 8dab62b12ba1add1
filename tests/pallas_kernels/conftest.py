"""What the tests that read the TPU compiler's schedules share."""

from collections.abc import Iterator

import pytest

from pallas_kernels.schedule import Compiler


class KeptCompiler(Compiler):
    """A compiler that goes on when a context ends: its process takes seconds to start."""

    def __exit__(self, *_: object) -> None:
        pass

    def end(self) -> None:
        super().__exit__()


@pytest.fixture(scope="package")
def v5e() -> Iterator[Compiler]:
    """Return the compiler of one kind of TPU, started once for the files that follow one another."""
    compiler = KeptCompiler("v5e")
    yield compiler
    compiler.end()
