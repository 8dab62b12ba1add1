"""The cases at which a kernel is tested, measured and tuned, and the rivals for comparison."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Blocks = Mapping[str, int]
"""Block sizes by keyword: ``{"block_q": 512, "block_k": 1024}``."""


@dataclass(frozen=True)
class Rival:
    """Another kernel for the same case, such as JAX's own, with the block sizes to try.

    ``function(*arguments, **blocks)`` computes the same; ``arguments`` None means those of the case.
    """

    name: str
    function: Callable[..., Any]
    blocks: tuple[Blocks, ...]
    arguments: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Case:
    """One real-size use of one kernel.

    ``function(*arguments, **blocks)`` runs the op at the given block sizes, or at its tuned ones without any. Like a
    rival's function it must pickle: use a function of a module, or a `functools.partial` of one. An argument is a
    `jax.ShapeDtypeStruct`, or a NumPy array if its values decide what the kernel does (lengths, tables, a layer's
    index). ``shape`` is the key of tuned.json: what the best blocks depend on, as the op derives it from its arguments.
    ``mxu_flops`` are the operations that the matrix units must do (multiply and add are two), counted at the bf16 peak
    or, with ``int8``, the int8 peak. ``floor_bytes`` is the least possible HBM traffic.

    ``reference(*arguments)`` computes the correct result, at higher precision. `random_inputs` draws arguments for
    both: numbers, trees for bool, and scales for float32 beside narrower dtypes. ``lanes`` is the number of a cache's
    lanes in use; the others are zeros. ``byte_heads`` are the number and the width of the heads of a cache that holds
    rows in bytes. ``donated`` are the indices of arguments that are overwritten.
    """

    kernel: str
    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    blocks: tuple[Blocks, ...]
    shape: Mapping[str, int | str]
    mxu_flops: int
    floor_bytes: int
    int8: bool = False
    reference: Callable[..., Any] | None = None
    lanes: int | None = None
    byte_heads: tuple[int, int] | None = None
    donated: tuple[int, ...] = ()
    rivals: tuple[Rival, ...] = field(default=(), repr=False)
