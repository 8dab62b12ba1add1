"""What a ``quantization_config`` says: where the matrices in few bits are."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxinfer.checkpoint.published.stored import Layer, Stored


class Scheme(NamedTuple):
    """How a checkpoint is read: a name for messages, and a function that finds its matrices in few bits.

    ``layers`` maps the name that a matrix has in a checkpoint of plain numbers to the matrix. ``dropped`` are endings
    of tensors that nothing here reads, such as scales of activations; ``notice`` is a line for the user.
    """

    name: str
    layers: Callable[[Stored], Mapping[str, Layer]]
    dropped: tuple[str, ...] = ()
    notice: str | None = None
