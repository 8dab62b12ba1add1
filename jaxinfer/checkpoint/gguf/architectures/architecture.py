"""What one of llama.cpp's architectures is to a reader of Hugging Face models: data, and a reading of its keys."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.checkpoint.gguf.config import FileTensors
from jaxinfer.checkpoint.gguf.metadata import MetadataReader


@dataclass(frozen=True)
class Architecture:
    """One architecture: its metadata as a ``config.json``, and where its tensors stand under Hugging Face's names.

    ``top`` maps whole names; ``block`` maps the part between ``blk.N.`` and ``.weight`` or ``.bias`` to what follows
    ``layers`` and the layer's number. The other fields are what llama.cpp's converter did and reading must undo:
    ``fused`` names parts that hold several of Hugging Face's tensors, one below the other, each with the configuration
    key of its number of heads; ``interleaved`` the parts whose output rows go by neighbours within each head, with the
    same key; ``transposed`` the parts whose matrices Hugging Face keeps as ``[in, out]``; ``norm_shift`` is what was
    added to every norm's weights. ``rope_divisors`` are tensors that the configuration takes in.
    """

    name: str
    translate: Callable[[MetadataReader, FileTensors], dict[str, Any]]
    top: Mapping[str, str]
    block: Mapping[str, str]
    layers: str = "model.layers"
    fused: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    interleaved: Mapping[str, str] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()
    norm_shift: float = 0.0
    rope_divisors: tuple[str, ...] = ("rope_freqs.weight",)
