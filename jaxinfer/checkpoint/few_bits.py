"""Reads a checkpoint's kernels and tables in few bits: rounded to a form, or a GGUF file's blocks in their own bits."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoint.aligned import aligned_empty
from jaxinfer.checkpoint.few_bits_experts import as_stack, check_numbers, round_experts
from jaxinfer.checkpoint.leaves import Leaf
from jaxinfer.checkpoint.source import BlockRows, BlockSource, Checkpoint, QuantizedSource
from jaxinfer.errors import InvalidCheckpoint, InvalidOption, shown
from jaxinfer.models.families.registry import family_of
from jaxinfer.models.few_bits import is_expert, is_kernel, is_table
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.few_bits.formats import (
    FP8,
    GGUF_FORMATS,
    GROUPS,
    INT8,
    MOST_EXPONENT,
    MXFP4,
    SHARES,
    TWO_OF_FOUR,
    Format,
    blocks,
    int4,
    nf4,
)
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.ops.few_bits.round_to_nearest import round_to_nearest

_GGUF = "gguf"
_SPARSE = "2:4"
_NAMES = ("int8", "int4", "nf4", "mxfp4", "fp8", _SPARSE, "blocks", _GGUF)
_SLAB_BYTES = 1 << 22
_INFINITE = 0x7C00  # the exponent of a float16 that is no finite number


@dataclass(frozen=True)
class FewBits:
    """What ``weights=`` asks for: the ``form`` of kernels; None: the blocks of a GGUF file.

    Tables, which are read by rows as well, are int8 where kernels are rounded, in the groups of kernels in int8, and
    stay as they are where kernels are sparse. With ``only_experts`` all but the kernels of experts stays as it is.
    """

    name: str
    form: Format | None
    only_experts: bool = False

    def takes(self, path: tuple[str, ...]) -> bool:
        """Whether a parameter is to be in few bits."""
        if self.form is not None and self.form.kept is not None and is_table(path):
            return False
        return is_expert(path) or (not self.only_experts and (is_kernel(path) or is_table(path)))

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise InvalidOption for a checkpoint that has no blocks to read, or is in few bits already."""
        tensors = checkpoint.tensors
        if isinstance(tensors, QuantizedSource) and tensors.forms():
            how = f" ({checkpoint.quantized_by})" if checkpoint.quantized_by else ""
            mend = "leave weights= out, or convert the model with --dtype first"
            raise InvalidOption(
                f"weights {self.name!r}: those of {checkpoint.origin} are in few bits already{how}: {mend}"
            )
        if self.only_experts and family_of(checkpoint.config).translate(checkpoint.config).experts is None:
            raise InvalidOption(f"weights {self.name!r}: {checkpoint.origin} has no experts: leave only= out")
        if self.form is not None:
            return
        if not isinstance(tensors, BlockSource):
            raise InvalidOption(f"weights {self.name!r}: {checkpoint.origin} is no GGUF file; use int8 or int4")
        if not any(tensors.kind(name) in GGUF_FORMATS for name in tensors.shapes()):
            known = ", ".join(GGUF_FORMATS)
            raise InvalidOption(f"weights {self.name!r}: {checkpoint.origin} has no {known}; use int8 or int4")


@dataclass
class FewBitsReader:
    """Rounds what can be in few bits, or takes a GGUF file's blocks as they are (`MatrixReader`)."""

    few_bits: FewBits
    backend: Backend | None = None
    widened: set[str] = field(default_factory=set)

    def named(self, checkpoint: Checkpoint) -> str:
        """Return what is asked for."""
        return f"weights {self.few_bits.name!r}"

    def read(self, checkpoint: Checkpoint, leaf: Leaf, read_plainly: Any) -> QuantizedArray | None:
        """Return a kernel or a table in few bits, None for a parameter that stays as it is.

        ``read_plainly(checkpoint, leaf)`` reads any parameter.
        """
        if not self.few_bits.takes(leaf.path):
            return None
        if self.few_bits.form is None:
            return self._blocks(checkpoint, leaf)
        form = self.few_bits.form.of_tables if is_table(leaf.path) else self.few_bits.form
        form.check_width(f"weights {self.few_bits.name!r}: {leaf.sources[0][0].tensor}", leaf.shape[-1])
        if is_expert(leaf.path):
            return round_experts(checkpoint, leaf, form, read_plainly)
        shape = (*leaf.struct.shape[: leaf.stacked], *leaf.shape)
        struct = jax.ShapeDtypeStruct(shape, jnp.float32)
        weights = read_plainly(checkpoint, replace(leaf, struct=struct, transposed=False))
        found = round_to_nearest(weights, form)
        tensors = [parts[0].tensor for parts in leaf.sources]
        check_numbers(checkpoint, tensors if leaf.stacked else tensors[:1], weights, found)
        return jax.block_until_ready(found)

    def _blocks(self, checkpoint: Checkpoint, leaf: Leaf) -> QuantizedArray | None:
        tensors = checkpoint.tensors
        assert isinstance(tensors, BlockSource)
        found: list[QuantizedArray] = []
        sources = [parts[0] for parts in leaf.sources if len(parts) == 1]
        if len(sources) < len(leaf.sources):  # parameters of several tensors are widened
            return None
        for source in sources:
            kind, rows = tensors.kind(source.tensor), tensors.blocks(source.tensor)
            if kind is None:
                return None
            if kind not in GGUF_FORMATS or rows is None or source.transposed:
                self.widened.add(f"blocks of {kind}, which have no products of their own")
                return None
            found.append(_split(checkpoint.origin, source.tensor, rows, kind))
        return join_layers(leaf, [rows_of(each, source.rows(leaf.num_rows)) for each, source in zip(found, sources)])


def parse_few_bits(spec: str | None) -> FewBits | None:
    """Return what ``weights=`` asks for, such as ``int4:group=128,symmetric=yes``; None for None."""
    if spec is None:
        return None
    if not isinstance(spec, str):
        raise InvalidOption(f"weights {shown(spec)} is no text; use one of {', '.join(_NAMES)}")
    name, _, options = spec.partition(":")
    if spec.partition(":only=")[0] == _SPARSE:
        name, options = _SPARSE, spec[len(_SPARSE) + 1 :]
    if name not in _NAMES:
        raise InvalidOption(f"unknown weights {shown(spec)}; use one of {', '.join(_NAMES)}")
    parts = [option.partition("=") for option in options.split(",") if option]
    given = {key: value for key, _, value in parts}
    known = _OPTIONS.get(name, {})
    for key, value in given.items():
        if key not in known:
            raise InvalidOption(
                f"unknown option {key!r} of weights {name}; its options are: {', '.join(known) or 'none'}"
            )
        if value not in known[key]:
            raise InvalidOption(f"weights {name}: {key}={value!r} is none of {', '.join(known[key])}")
    group, is_symmetric = int(given.get("group", 64)), given.get("symmetric") == "yes"
    kept = _SHARES[given.get("kept", "1/2")]
    forms = {_SPARSE: TWO_OF_FOUR, "blocks": blocks(kept)}
    floats = replace(FP8, group=group, scale_type="float32") if "group" in given else FP8
    integers = replace(INT8, group=group) if "group" in given else INT8
    forms |= {"int8": integers, "fp8": floats, "mxfp4": MXFP4, "nf4": nf4(group), "int4": int4(group, is_symmetric)}
    return FewBits(spec, forms.get(name), "only" in given)


_SIZES = tuple(map(str, GROUPS))
_ONLY = {"only": ("experts",)}
_SHARES = {f"{some}/{all_of}": (some, all_of) for some, all_of in SHARES}
_OPTIONS: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "int4": {"group": _SIZES, "symmetric": ("yes", "no"), **_ONLY},
        "nf4": {"group": _SIZES, **_ONLY},
        "blocks": {"kept": tuple(_SHARES), **_ONLY},
        "int8": {"group": _SIZES, **_ONLY},
        "fp8": {"group": _SIZES, **_ONLY},
        **dict.fromkeys(("mxfp4", _SPARSE, _GGUF), _ONLY),
    }
)


def join_layers(leaf: Leaf, layers: list[QuantizedArray]) -> QuantizedArray:
    """Return a parameter on the device, of its layers on the host: rows of all of a layer's matrices."""
    if len({each.form for each in layers}) > 1:
        raise InvalidOption("layers whose weights are in several forms cannot be scanned: leave scan_layers out")
    layers = [as_stack(each, leaf) for each in layers]
    whole = jax.tree.map(lambda *parts: np.stack(parts), *layers) if leaf.stacked else layers[0]
    return jax.block_until_ready(jax.device_put(whole))


def rows_of(array: QuantizedArray, rows: slice | np.ndarray) -> QuantizedArray:
    """Return some rows of a matrix on the host."""
    return array.map_rows(lambda part: part[rows])


def _split(origin: str, tensor: str, rows: BlockRows, kind: str) -> QuantizedArray:
    """Return a tensor's blocks with codes, scales and minima apart, which a product reads one after the other."""
    # Imported here: other formats need no GGUF reader.
    from jaxinfer.checkpoint.gguf.block_parts import split_blocks

    form, num_rows = GGUF_FORMATS[kind], len(rows.data)
    blocks = rows.data.reshape(num_rows, rows.num_blocks, -1)
    shapes = form.parts(num_rows, rows.num_blocks * form.unit)
    parts = [aligned_empty(shape, np.dtype(dtype)) for shape, dtype in shapes.values()]
    step = max(1, _SLAB_BYTES // blocks[:1].nbytes)

    def split(start: int) -> None:
        span = slice(start, start + step)
        to = span if rows.places is None else rows.places[span]
        some = blocks[span]
        for part, values in zip(parts, split_blocks(some.reshape(-1, some.shape[-1]), kind), strict=True):
            part[to] = values.reshape(len(some), -1)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(split, range(0, num_rows, step)))
    halves = [part for part in parts if part.dtype == np.float16]
    if any(((part.view(np.uint16) & _INFINITE) == _INFINITE).any() for part in halves):
        raise InvalidCheckpoint(f"{origin}: {tensor} has a scale that is no finite number; download the file again")
    found = QuantizedArray.of(form, parts)
    if form.scale_dtype == "uint8" and (found.scales > MOST_EXPONENT).any():
        raise InvalidCheckpoint(f"{origin}: {tensor} has a scale that is too large; download the file again")
    return found
