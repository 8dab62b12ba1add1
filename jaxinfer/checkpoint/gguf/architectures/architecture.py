"""Describes one of llama.cpp's architectures in Hugging Face terms: tensor names and a reader of its metadata."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxinfer.checkpoint.gguf.config import FileTensors
from jaxinfer.checkpoint.gguf.metadata import MetadataReader


@dataclass(frozen=True)
class Architecture:
    """One architecture: its metadata as a ``config.json``, and the Hugging Face names of its tensors.

    ``top`` maps whole names. ``block`` maps the part between ``blk.N.`` and ``.weight`` or ``.bias`` to the part after
    ``layers`` and the layer's number (a name that ends with ``_bias`` is whole), and ``block_of`` those parts that have
    other names by the configuration. The other fields describe what llama.cpp's converter did and reading must undo.
    ``fused`` names parts that stack several Hugging Face tensors, each with the config key of its number of heads.
    ``interleaved`` names, with the same key, the parts whose output rows pair neighbours within each head. ``grouped``
    names parts whose rows are all queries', all keys', then all values', where Hugging Face's go group by group, with
    the config keys of both numbers of heads. ``transposed`` names the parts whose matrices Hugging Face stores as
    ``[in, out]``. Matrices of ``scaled`` parts may stand beside a number, ``blk.N.PART.scale``, by which they are
    multiplied. ``norm_shift`` was added to the weights of every norm. ``rope_divisors`` are tensors that belong in
    the config. ``arrays`` makes tensors of numbers that stand among the metadata, under their Hugging Face names.
    """

    name: str
    translate: Callable[[MetadataReader, FileTensors], dict[str, Any]]
    top: Mapping[str, str]
    block: Mapping[str, str]
    layers: str = "model.layers"
    block_of: Callable[[Mapping[str, Any]], Mapping[str, str]] | None = None
    fused: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    interleaved: Mapping[str, str] = field(default_factory=dict)
    grouped: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()
    scaled: frozenset[str] = frozenset()
    norm_shift: float = 0.0
    rope_divisors: tuple[str, ...] = ("rope_freqs.weight",)
    arrays: Callable[[MetadataReader, Mapping[str, Any]], Mapping[str, np.ndarray]] | None = None
