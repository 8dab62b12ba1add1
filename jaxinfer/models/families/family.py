"""A family of checkpoints as data: a translation of its ``config.json``, and the names of its tensors."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxinfer.models.config import DecoderConfig


@dataclass(frozen=True)
class Part:
    """A parameter that is a part of a checkpoint's tensor, or is stored transposed.

    The tensor has ``total`` rows (0: as many as the parameter); the parameter's begin at ``first``. ``transposed``
    means that a kernel is stored ``[in, out]``, so these rows are the tensor's columns. ``rotary`` is set where rotary
    positions of the checkpoint turn neighbouring rows 2i and 2i + 1 of each head together: a head's rows, and how many
    of them, R, turn. The parameter's are rows i and i + R / 2, which processors with wide vectors turn faster.
    ``heads`` is set where other rows stand between the heads', groups of heads, or the experts': the rows of one, and
    how far it is from the next. ``shape`` is the tensor's if it has the numbers of a vector in another shape, the rows
    of all experts, or those of other parameters too. With ``every`` the tensor has an axis for experts, and the
    parameter is every so manieth number of its last axis from ``first`` on, as many as it has; ``transposed`` is then
    meant of each expert's matrix. ``across`` means that the parameter is a stack ``[N, out, in]`` of matrices, each of
    which is stored ``[in, out]``, its rows those of a head. ``backwards``, beside ``rotary``, means that positions turn
    a head's halves, but the other way round, so that the parameter's upper half is the tensor's lower one.
    """

    tensor: str
    first: int = 0
    total: int = 0
    transposed: bool = False
    rotary: tuple[int, int] | None = None
    heads: tuple[int, int] | None = None
    shape: tuple[int, ...] | None = None
    every: int = 0
    across: bool = False
    backwards: bool = False

    def of_experts(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Return the view of a tensor that is the parameter of this shape, where there is ``every``."""
        count = shape[-2] if self.transposed else shape[-1]
        part = tensor[..., self.first : self.first + count * self.every : self.every]
        return part.swapaxes(-1, -2) if self.transposed else part

    def rows(self, count: int) -> "slice | np.ndarray":
        """Return where the ``count`` rows of the parameter stand in the tensor."""
        if self.rotary is None and self.heads is None:
            return slice(self.first, self.first + count)
        head_dim, turning = self.rotary or (0, 0)
        together, distance = self.heads or (head_dim, head_dim)
        lanes = np.arange(together).reshape(-1, head_dim or together)
        turned = lanes[:, :turning].reshape(len(lanes), -1, 2).swapaxes(1, 2)
        if self.backwards:
            turned = lanes[:, :turning].reshape(len(lanes), 2, -1)[:, ::-1]
        lanes[:, :turning] = turned.reshape(len(lanes), turning)
        return self.first + (distance * np.arange(count // together)[:, None] + lanes.reshape(-1)).reshape(-1)


# Several tensors are the parameter's rows, one after another, and have the same number of them. The rows of a stack of
# matrices, one for each expert, are those of the first matrix, then of the second, and so on.
Source = str | Part | tuple[str, ...]


# What a checkpoint with a vision model has that its text decoder does not.
TEXT_ALONE = "its vision model is left out: it reads and writes text alone"


@dataclass(frozen=True)
class TensorNames:
    """The checkpoint's tensor for each parameter of the decoder.

    ``top`` and ``block`` map a parameter's path, joined by dots, to a tensor name, to a `Part` of a tensor or to
    several names; in ``block`` a name contains ``{layer}``. Linear kernels are ``[out, in]``. ``ignored`` are regular
    expressions for whole names of tensors that the decoder does not need (recomputed buffers, a tied head stored
    twice). Depending on the conversion, names begin with ``optional_prefix`` or with ``other_prefix``, and the output
    matrix is then ``other_head``; some of a block's parameters are in the tensors of one of ``others``. ``notice`` says
    what a checkpoint with ignored tensors has that this decoder does not. ``modules`` are parts of names, and what
    transformers calls them in the path of a module, which an adapter's names come from.
    """

    top: Mapping[str, Source]
    block: Mapping[str, Source]
    ignored: tuple[str, ...] = ()
    optional_prefix: str = ""
    other_prefix: str = ""
    other_head: str = ""
    notice: str | None = None
    others: tuple[Mapping[str, Source], ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)

    def spelled_in(self, tensors: Iterable[str]) -> "TensorNames":
        """Return the names that a checkpoint with these tensors, which may be a mapping to their shapes, uses."""
        shapes: Mapping[str, Any] = tensors if isinstance(tensors, Mapping) else {}
        tensors, names = list(tensors), self
        if not any(tensor.startswith(self.optional_prefix) for tensor in tensors):
            names = self.moved(self.optional_prefix, self.other_prefix)
            head = {"head.kernel": self.other_head} if self.other_head else {}
            names = replace(names, top={**names.top, **head})
        of_layers: dict[str, Any] = {}
        for tensor in tensors if names.others else ():
            shape = shapes.get(tensor)
            of_layers[_of_layers(tensor)] = None if shape is None else tuple(shape)

        def holds(block: Mapping[str, Source]) -> bool:
            return all(name in of_layers for source in block.values() for name in names_of(source))

        def fits(block: Mapping[str, Source]) -> bool:
            parts = (source for source in block.values() if isinstance(source, Part) and source.shape is not None)
            return all(of_layers[part.tensor] in (None, part.shape) for part in parts)

        # Where forms differ in their shapes alone, the one that fits.
        found = sorted(filter(holds, names.others), key=lambda block: not fits(block))
        return replace(names, block={**names.block, **found[0]}) if found else names

    def notice_for(self, tensors: Iterable[str]) -> str | None:
        """Return the notice if some of a checkpoint's tensors are ignored."""
        is_ignored = re.compile("|".join(self.ignored) or r"(?!)").fullmatch
        return self.notice if any(map(is_ignored, tensors)) else None

    def leaves_out(self, tensor: str) -> bool:
        """Tell whether a tensor, or what changes it, is of what this decoder does not have beside a text model."""
        return self.notice is not None and re.fullmatch("|".join(self.ignored), tensor) is not None

    def of_matrices(self) -> "TensorNames":
        """Return the names that say of each matrix of experts where its rows are, as of weights in few bits."""
        for block in ({}, *self.others):
            merged = {**self.block, **block}
            experts = [source for path, source in merged.items() if path.startswith("mlp.experts.")]
            if not any(isinstance(source, Part) and source.every for source in experts):
                return replace(self, block=merged)
        return self

    def moved(self, prefix: str, to: str) -> "TensorNames":
        """Return the names with the prefix ``prefix`` replaced by ``to``."""
        return self._named(lambda name: to + name.removeprefix(prefix) if name.startswith(prefix) else name)

    def of_modules(self) -> "TensorNames":
        """Return the names as those of modules."""
        return self._named(lambda name: renamed(name, self.modules))

    def _named(self, change: Callable[[str], str]) -> "TensorNames":
        def every(names: Mapping[str, Source]) -> dict[str, Source]:
            return {path: each_name(source, change) for path, source in names.items()}

        others = tuple(map(every, self.others))
        return replace(self, top=every(self.top), block=every(self.block), others=others)


def names_of(source: Source) -> tuple[str, ...]:
    """Return the names of a source's tensors."""
    if isinstance(source, tuple):
        return source
    return (source.tensor if isinstance(source, Part) else source,)


def _of_layers(tensor: str) -> str:
    """Return the name with ``{layer}`` for the first number in it."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "{layer}", tensor, count=1)


def renamed(name: str, words: Mapping[str, str]) -> str:
    """Return a name of parts that dots join with some of them replaced."""
    name = f".{name}."
    for old, new in words.items():
        name = name.replace(f".{old}.", f".{new}.")
    return name[1:-1]


def each_name(source: Source, change: Callable[[str], str]) -> Source:
    """Return the source with its names changed."""
    if isinstance(source, tuple):
        return tuple(map(change, source))
    return replace(source, tensor=change(source.tensor)) if isinstance(source, Part) else change(source)


@dataclass(frozen=True)
class Family:
    """One model family: Hugging Face's ``model_type``, and how to turn its files into a decoder.

    ``translate`` takes the parsed ``config.json`` (transformers 4 or 5). It raises
    :class:`jaxinfer.errors.UnsupportedModel`, naming the key or value, for anything that the decoder does not
    implement.
    """

    model_type: str
    architectures: tuple[str, ...]
    translate: Callable[[Mapping[str, Any]], DecoderConfig]
    tensor_names: Callable[[DecoderConfig], TensorNames]
