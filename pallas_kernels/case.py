"""What a kernel is tested, measured and tuned at: its cases, and the rivals that they are compared with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Blocks = Mapping[str, int]
"""Block sizes by the name of the keyword that takes them: ``{"block_q": 512, "block_k": 1024}``."""


@dataclass(frozen=True)
class Rival:
    """Another kernel for the same case, such as JAX's own, with the block sizes to try it at.

    ``function(*arguments, **blocks)`` computes the same; ``arguments`` are those of the case unless given.
    """

    name: str
    function: Callable[..., Any]
    blocks: tuple[Blocks, ...]
    arguments: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Case:
    """One real-size use of one kernel.

    ``function(*arguments, **blocks)`` runs the op at the given block sizes, or at its tuned ones without any; like a
    rival's it must pickle: a function of a module, or a `functools.partial` of one. An argument is a
    `jax.ShapeDtypeStruct`, or a NumPy array where its values decide what the kernel does (lengths, tables, a layer's
    index). ``shape`` is the key of tuned.json: what the best blocks depend on, as the op derives it from its arguments.
    ``mxu_flops`` are the operations that the answer needs of the matrix units (multiply and add are two), counted at
    the bf16 or, with ``int8``, the int8 peak; ``floor_bytes`` is what must cross from or to HBM at the least.

    ``reference(*arguments)`` defines what is correct, at higher precision. Random arguments for both are numbers, trees
    where they are bool, and scales where they are float32 beside narrower ones (`random_inputs`); ``lanes`` is how many
    of a cache's hold something, where the rest are zeros. ``donated`` says which arguments, by index, are written
    over.
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
    donated: tuple[int, ...] = ()
    rivals: tuple[Rival, ...] = field(default=(), repr=False)
