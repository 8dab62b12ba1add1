"""What a family of checkpoints is, as data: a translation of its ``config.json`` and the names of its tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.models.config import DecoderConfig


@dataclass(frozen=True)
class TensorNames:
    """Where each parameter of the decoder stands in a checkpoint.

    ``top`` and ``block`` map a parameter's path, joined by dots, to the checkpoint's tensor name; in ``block`` the name
    holds ``{layer}``. Linear kernels are ``[out, in]`` on both sides. ``ignored`` are regular expressions for whole
    names of tensors that carry no information for the decoder (recomputed buffers, a tied head stored twice).
    """

    top: Mapping[str, str]
    block: Mapping[str, str]
    ignored: tuple[str, ...] = ()


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
