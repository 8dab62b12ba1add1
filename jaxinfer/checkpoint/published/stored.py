"""A published checkpoint's tensors as they are stored, and the matrices that several of them make up."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxinfer.checkpoint.source import DescribedSource
from jaxinfer.errors import InvalidCheckpoint
from jaxinfer.ops.few_bits.formats import Format
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray

# Of scales; products multiply them as they are.
FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Layer:
    """A matrix ``shape`` of the checkpoint, the names of the tensors that make it up, and how it is read.

    ``holds`` is a dtype that holds its numbers without loss, None if that is not known.
    """

    parts: tuple[str, ...]
    shape: tuple[int, int]
    read: Callable[[], "Matrix"]
    holds: str | None = None


class Matrix(Protocol):
    """A matrix in few bits; one without a `form` is only read as plain numbers."""

    @property
    def form(self) -> Format | None: ...

    def dense(self) -> np.ndarray:
        """Return the weights in float32."""
        ...

    def quantized(self) -> QuantizedArray:
        """Return the weights in their own bits, in NumPy's arrays; check `form` first."""
        ...


class Stored:
    """Tensors of integers and floats of any size; raises :class:`InvalidCheckpoint` that names what is wrong."""

    def __init__(self, origin: str, source: DescribedSource):
        self.origin = origin
        self.source = source
        self.metadata = source.metadata()
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(shape) for name, shape in source.shapes().items()}

    def ending_in(self, suffix: str) -> list[str]:
        """Return what comes before a suffix in all names that end in it."""
        return [name.removesuffix(suffix) for name in self.shapes if name.endswith(suffix)]

    def matrix_shape(self, name: str) -> tuple[int, int]:
        """Return the shape of a tensor that must be a matrix."""
        if name not in self.shapes:
            raise InvalidCheckpoint(f"{self.origin}: missing tensor {name}; fetch all files of the model")
        shape = self.shapes[name]
        if len(shape) != 2 or not all(shape):
            raise self.wrong(name, f"has shape {list(shape)}, but it must be a matrix")
        return shape[0], shape[1]

    def num_bytes(self, name: str) -> int:
        """Return the size of a tensor, 0 where there is none."""
        dtype = self.source.stored_dtype(name) if name in self.shapes else None
        return 0 if dtype is None else math.prod(self.shapes[name]) * dtype.itemsize

    def read(self, name: str, shape: tuple[int, ...] | None, *dtypes: str) -> np.ndarray:
        """Return a tensor that must have this shape (None: any) and one of these dtypes."""
        return self.source.read(name, self.check(name, shape, *dtypes))

    def check(self, name: str, shape: tuple[int, ...] | None, *dtypes: str) -> np.dtype:
        """Return a tensor's dtype; raise InvalidCheckpoint unless it can be `read` so."""
        if name not in self.shapes:
            raise InvalidCheckpoint(f"{self.origin}: missing tensor {name}; fetch all files of the model")
        found, dtype = self.shapes[name], self.source.stored_dtype(name)
        if shape is not None and found != shape:
            raise self.wrong(name, f"has shape {list(found)}, but its configuration makes it {list(shape)}")
        if dtype is None or dtype.name not in dtypes:
            raise self.wrong(name, f"has type {dtype}, but it must be {' or '.join(dtypes)}")
        return dtype

    def scales(self, name: str, *shapes: tuple[int, ...]) -> np.ndarray:
        """Return a tensor of finite floats, in the first of several shapes that all hold the same numbers."""
        shape = self.shapes.get(name)
        scales = self.read(name, shape if shape in shapes else shapes[0], *FLOATS)
        if not np.isfinite(scales.astype(np.float32)).all():
            raise self.wrong(name, "has a scale that is no finite number; download the file again")
        return scales.reshape(shapes[0])

    def block_scales(self, name: str, shape: tuple[int, int], block: tuple[int, int], *dtypes: str) -> np.ndarray:
        """Return what each block of so many rows and inputs of a matrix has, for each row: ``[N, G]``.

        A block of 0 is all. Where there is one for each row, or one in all, it may be written with fewer axes. Finite
        floats, unless other ``dtypes`` are named.
        """
        (outputs, width), (height, length) = shape, block
        height, length = height or outputs, length or width
        grid = -(-outputs // height), -(-width // length)
        others = [(grid[0],)] if grid[1] == 1 else []
        others += [()] if grid == (1, 1) else []
        if dtypes:
            own = self.shapes.get(name)
            found = self.read(name, own if own in others else grid, *dtypes).reshape(grid)
        else:
            found = self.scales(name, grid, *others)
        return np.repeat(found, height, axis=0)[:outputs]

    def starting_with(self, prefix: str) -> list[str]:
        """Return all names that begin so."""
        return [name for name in self.shapes if name.startswith(prefix)]

    def wrong(self, name: str, why: str) -> InvalidCheckpoint:
        """Return the error, for the caller to raise, that names a tensor."""
        return InvalidCheckpoint(f"{self.origin}: tensor {name} {why}")


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Return the codes of 4 or 8 bits in 32-bit integers, the lowest first, along the last axis."""
    in_bytes = np.ascontiguousarray(words).view(np.uint8)
    return in_bytes if bits == 8 else in_halves(in_bytes)


def in_halves(in_bytes: np.ndarray, high_first: bool = False) -> np.ndarray:
    """Return both halves of each byte, along the last axis."""
    low, high = in_bytes & 15, in_bytes >> 4
    halves = np.stack([high, low] if high_first else [low, high], axis=-1)
    return halves.reshape(*in_bytes.shape[:-1], -1)
