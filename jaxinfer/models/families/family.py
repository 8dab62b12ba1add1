"""What a family of checkpoints is, as data: a translation of its ``config.json`` and the names of its tensors."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxinfer.models.config import DecoderConfig


@dataclass(frozen=True)
class Part:
    """A parameter that is part of a checkpoint's tensor, or that stands there another way round.

    Of the tensor's ``total`` rows (0: as many as the parameter has), those of the parameter begin at ``first``.
    ``transposed`` tells that a kernel is stored ``[in, out]``, so that these rows are the tensor's columns.
    """

    tensor: str
    first: int = 0
    total: int = 0
    transposed: bool = False


Source = str | Part


@dataclass(frozen=True)
class TensorNames:
    """Where each parameter of the decoder stands in a checkpoint.

    ``top`` and ``block`` map a parameter's path, joined by dots, to the checkpoint's tensor name, or to a `Part` of a
    tensor; in ``block`` the name holds ``{layer}``. Linear kernels are ``[out, in]``. ``ignored`` are regular
    expressions for whole names of tensors that carry no information for the decoder (recomputed buffers, a tied head
    stored twice). Conversions differ in whether names begin with ``optional_prefix`` or with ``other_prefix``.
    """

    top: Mapping[str, Source]
    block: Mapping[str, Source]
    ignored: tuple[str, ...] = ()
    optional_prefix: str = ""
    other_prefix: str = ""

    def spelled_in(self, tensors: Iterable[str]) -> "TensorNames":
        """Return the names as a checkpoint with these tensors spells them: the other way where none has the prefix."""
        if any(tensor.startswith(self.optional_prefix) for tensor in tensors):
            return self
        return self.moved(self.optional_prefix, self.other_prefix)

    def moved(self, prefix: str, to: str) -> "TensorNames":
        """Return names that begin with ``to`` where these begin with ``prefix``."""

        def move(names: Mapping[str, Source]) -> dict[str, Source]:
            return {path: _move(source, prefix, to) for path, source in names.items()}

        return replace(self, top=move(self.top), block=move(self.block))


def _move(source: Source, prefix: str, to: str) -> Source:
    tensor = source.tensor if isinstance(source, Part) else source
    moved = to + tensor.removeprefix(prefix) if tensor.startswith(prefix) else tensor
    return replace(source, tensor=moved) if isinstance(source, Part) else moved


@dataclass(frozen=True)
class Family:
    """One model family: ``model_type`` as Hugging Face writes it, and what turns its files into a decoder.

    ``translate`` takes the parsed ``config.json`` (transformers 4 or 5) and raises
    :class:`jaxinfer.errors.UnsupportedModel` that names a key or value which the decoder does not implement.
    """

    model_type: str
    architectures: tuple[str, ...]
    translate: Callable[[Mapping[str, Any]], DecoderConfig]
    tensor_names: Callable[[DecoderConfig], TensorNames]
