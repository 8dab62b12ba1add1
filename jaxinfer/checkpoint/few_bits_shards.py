"""Reads kernels and tables in few bits for a mesh: a layer's at a time, of which each device gets its part."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxinfer.checkpoint.aligned import aligned_empty
from jaxinfer.checkpoint.leaves import Leaf
from jaxinfer.checkpoint.matrix_readers import MatrixReader
from jaxinfer.checkpoint.shards import Box, distinct_boxes, make_sharded
from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.errors import InvalidOption
from jaxinfer.models.few_bits import is_expert, laid_out_matrix
from jaxinfer.ops.few_bits.columns import maybe_by_columns
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.ops.few_bits.split import check_split, pad_quantized, part_shardings, transposed


def read_few_bits(reader: MatrixReader, checkpoint: Checkpoint, leaf: Leaf, read_plainly: Any) -> QuantizedArray | None:
    """Return what ``reader`` reads, padded and split as ``leaf.struct`` says; on one device, as this multiplies it.

    Weights are rounded before they are padded and split, so that a mesh multiplies by the weights of one device. Memory
    holds no more than the devices' parts and one layer's kernel.
    """
    backend = reader.backend
    by_columns = backend is not None and backend.kernels != "xla"
    if leaf.struct.sharding is None:
        found = reader.read(checkpoint, leaf, read_plainly)
        if found is None or backend is None:
            return found
        return (
            maybe_by_columns(found, found.shape[-1])
            if by_columns
            else laid_out_matrix(found, backend, is_expert(leaf.path))
        )
    sharding, padding = leaf.struct.sharding, leaf.padding[leaf.stacked :]
    if leaf.transposed:
        sharding, padding = transposed(sharding), padding[::-1]
    name = f"{reader.named(checkpoint)}: {leaf.sources[0][0].tensor}"
    held: _Held | None = None
    for layer, parts in enumerate(leaf.sources):
        shape = leaf.shape
        plain = replace(
            leaf,
            struct=jax.ShapeDtypeStruct(shape, jnp.float32),
            sources=(parts,),
            stacked=False,
            transposed=False,
            padding=(None,) * len(shape),
        )
        found = reader.read(checkpoint, plain, read_plainly)
        if found is None:
            return None
        padded = pad_quantized(jax.tree.map(np.asarray, found), padding, name)
        width = check_split(padded, sharding, name)
        if by_columns:
            padded = jax.tree.map(np.asarray, maybe_by_columns(padded, width))
        if held is None:
            held = _Held(padded, sharding, len(leaf.sources) if leaf.stacked else None)
        if held.one.form != padded.form:
            raise InvalidOption(
                f"{name}: layers whose weights are in several forms cannot be scanned or split over pipeline: "
                "leave these out"
            )
        held.take(padded, layer)
    assert held is not None
    return held.whole()


class _Held:
    """The devices' parts of an array of which one layer, or all, is known."""

    def __init__(self, one: QuantizedArray, sharding: NamedSharding, layers: int | None) -> None:
        self.one = one
        self.is_stacked = layers is not None
        self.shardings = part_shardings(one, sharding).matrix
        self.shapes = [part.shape if layers is None else (layers, *part.shape) for part in one.matrix]
        self.boxes: list[list[Box]] = [distinct_boxes(*each) for each in zip(self.shapes, self.shardings)]
        self.buffers = [
            [aligned_empty(tuple(place.stop - place.start for place in box), part.dtype) for box in boxes]
            for part, boxes in zip(one.matrix, self.boxes)
        ]

    def take(self, one: QuantizedArray, layer: int) -> None:
        for part, boxes, buffers in zip(one.matrix, self.boxes, self.buffers):
            for box, buffer in zip(boxes, buffers):
                if not self.is_stacked:
                    buffer[...] = part[box]
                elif box[0].start <= layer < box[0].stop:
                    buffer[layer - box[0].start] = part[box[1:]]

    def whole(self) -> QuantizedArray:
        parts = [
            make_sharded(shape, sharding, lambda _, buffers=buffers: buffers)
            for shape, sharding, buffers in zip(self.shapes, self.shardings, self.buffers)
        ]
        return self.one.with_parts(parts)
