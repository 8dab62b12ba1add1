"""The stacks of all adapters that a model has loaded, as `jaxinfer.models.adapters` describes them, on its devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.adapter_basis import OfKernel
from jaxinfer.adapter_parts import HEAD_SHIFT, OwnParts
from jaxinfer.checkpoint.adapters.peft_folder import Adapter
from jaxinfer.models.adapters import EMBED, HEAD, OF_HEADS, kernel_axes, kernel_shapes
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.layers import BLOCKS, EXPERTS, KERNEL, TRANSPOSED_KERNEL, locate
from jaxinfer.models.own_tables import COPY
from jaxinfer.models.padding import adapter_sources, pad_config
from jaxinfer.notation import EXPERT, PIPELINE, TENSOR, Params
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.each_device import even_axis
from jaxinfer.ops.logical_axes import SPLIT_BY
from jaxinfer.parallel.partitioner import Partitioner

# The fewest that ranks, and rows of tables, are filled up to.
_LEAST = 8


@dataclass(frozen=True)
class Loaded:
    """An adapter that has a number, its part in each kernel by layer and name, and what else it changes.

    ``copies`` are its own whole tables, on the devices.
    """

    adapter: Adapter
    number: int
    kernels: Mapping[tuple[int, str], OfKernel]
    others: OwnParts
    copies: Mapping[str, jax.Array]

    def shift(self, layer: int, name: str) -> np.ndarray | None:
        """Return what is added to the outputs of a linear layer of a block, None for nothing."""
        own = self.kernels.get((layer, name))
        found = (None if own is None else own.shift_O), self.others.vectors.get((layer, f"{name}.shift"))
        added = [each for each in found if each is not None]
        return sum(added[1:], added[0]) if added else None


@dataclass(frozen=True)
class AdapterStacks:
    """Stacks adapters for the parameters ``base`` of a model on a partitioner's devices."""

    config: DecoderConfig
    backend: Backend
    base: Params
    partitioner: Partitioner

    def of(self, loaded: Sequence[Loaded]) -> Params:
        """Return the stacks of these adapters, of few sizes: numbers of adapters, ranks and rows are powers of two."""
        number = _power_of_two(max(each.number for each in loaded))
        pairs = [pair for each in loaded for pair in (*each.kernels.values(), *each.others.pairs.values())]
        ranks = (pair.down_RI.shape[0] for pair in pairs)
        sizes = number, _filled(ranks)
        found = {BLOCKS: self._beside(self.base[BLOCKS], (BLOCKS,), loaded, sizes)}
        for norm in ("embed_norm", "final_norm"):
            if norm in self.base:
                found[norm] = self._of_norm(self.base[norm], (norm,), loaded, number)
        found |= {table: self._of_table(table, loaded, number) for table in (EMBED, HEAD)}
        return {name: stacks for name, stacks in found.items() if stacks}

    def _beside(
        self, node: Mapping[str, Any], path: tuple[str, ...], loaded: Sequence[Loaded], sizes: tuple[int, int]
    ) -> Params:
        """Return the stacks for all linear layers and norms below a node of the blocks' parameters."""
        kernel = next((node[name] for name in (KERNEL, TRANSPOSED_KERNEL) if name in node), None)
        if kernel is not None:
            layers, stacked, name, _ = locate((*path, KERNEL), kernel.shape)
            assert layers is not None
            return self._of_linear(layers, stacked, name.removesuffix(f".{KERNEL}"), loaded, sizes)
        if ".".join(path[-2:]) in OF_HEADS:
            layers, stacked, name, _ = locate((*path, "weights"), node["weights"].shape)
            assert layers is not None
            return self._of_linear(layers, stacked, name.removesuffix(".weights"), loaded, sizes)
        if path[-1] in ("router", "shared_gate", EXPERTS):
            return self._of_pairs(node, path, loaded, sizes)
        if path[-1].endswith("norm"):
            return self._of_norm(node, path, loaded, sizes[0])
        below = {
            name: self._beside(value, (*path, name), loaded, sizes)
            for name, value in node.items()
            if isinstance(value, Mapping)
        }
        return {name: stacks for name, stacks in below.items() if stacks}

    def _of_linear(
        self, layers: range, stacked: bool, name: str, loaded: Sequence[Loaded], sizes: tuple[int, int]
    ) -> Params:
        """Return a linear layer's stacks, or those of several layers; none where no adapter has a part."""
        places = [(at, layer, each) for at, layer in enumerate(layers) for each in loaded]
        parts = {
            (at, each.number - 1): each.kernels[layer, name]
            for at, layer, each in places
            if (layer, name) in each.kernels
        }
        shifts = {
            (at, each.number - 1): shift for at, layer, each in places if (shift := each.shift(layer, name)) is not None
        }
        if not parts and not shifts:
            return {}
        of_outputs, of_inputs = adapter_sources(self.config, self.partitioner.tensor)[name]
        outputs, inputs = kernel_shapes(self.config)[name]
        outputs, inputs = (
            size if source is None else len(source) for size, source in ((outputs, of_outputs), (inputs, of_inputs))
        )
        number, rank = sizes
        down = np.zeros((len(layers), number, rank, inputs), np.float32)
        up = np.zeros((len(layers), number, rank, outputs), np.float32)
        gain = np.ones((len(layers), number, outputs), np.float32)
        added = np.zeros((len(layers), number, outputs), np.float32)
        for (at, index), part in parts.items():
            count = part.down_RI.shape[0]
            down[at, index, :count] = _spread(part.down_RI, of_inputs)
            up[at, index, :count] = _spread(part.up_RO, of_outputs)
            if part.gain_O is not None:
                gain[at, index] = _spread(part.gain_O, of_outputs)
        for place, shift in shifts.items():
            added[place] = _spread(shift, of_outputs)
        out_axis, in_axis = (SPLIT_BY.get(axis or "") for axis in kernel_axes(self.config)[name])
        stacks = {}
        if parts and name in OF_HEADS:
            # Each head's matrices stand together.
            of_heads = np.moveaxis(up.reshape(*up.shape[:-1], self._heads, -1), -2, 1)
            placed = self._placed(of_heads, None, stacked, first=out_axis)
            stacks = {"down": self._placed(down, None, stacked), "up": placed}
        elif parts:
            stacks = {"down": self._placed(down, in_axis, stacked), "up": self._placed(up, out_axis, stacked)}
        if any(part.gain_O is not None for part in parts.values()):
            stacks["gain"] = self._placed(gain, out_axis, stacked)
        if shifts:
            stacks["shift"] = self._placed(added, out_axis, stacked)
        return stacks

    def _of_pairs(
        self, node: Mapping[str, Any], path: tuple[str, ...], loaded: Sequence[Loaded], sizes: tuple[int, int]
    ) -> Params:
        """Return the stacks of a router, of a shared expert's gate, or of each kernel of experts.

        The latter are ``"gate_down"``, ``"gate_up"`` and so on.
        """
        stacks: Params = {}
        for part, kernel in node.items():
            layers, stacked, name, _ = locate((*path, part), kernel.shape)
            places = {
                (at, expert, each.number - 1): pair
                for at, layer in enumerate(layers or ())
                for each in loaded
                for (of_layer, of_name, expert), pair in each.others.pairs.items()
                if (of_layer, of_name) == (layer, name)
            }
            if not places:
                continue
            of_outputs, of_inputs = self._sources((*path, part))[-2:]
            lead = len(layers or ()), kernel.shape[-3] if path[-1] == EXPERTS else 1, *sizes
            down, up = (np.zeros((*lead, kernel.shape[axis]), np.float32) for axis in (-1, -2))
            for place, pair in places.items():
                rank = len(pair.down_RI)
                down[(*place, slice(rank))] = _spread(pair.down_RI, of_inputs)
                up[(*place, slice(rank))] = _spread(pair.up_OR.T, of_outputs)
            if path[-1] != EXPERTS:
                stacks |= {"down": self._placed(down[:, 0], None, stacked), "up": self._placed(up[:, 0], None, stacked)}
                continue
            backend = self.partitioner.partition(self.config, self.backend).backend
            expert_axis, ffn = (
                even_axis(EXPERT, lead[1], backend),
                even_axis(TENSOR, kernel.shape[-1 if part == "down" else -2], backend),
            )
            by_in, by_out = (ffn, None) if part == "down" else (None, ffn)
            stacks[f"{part}_down"] = self._placed(down, by_in, stacked, first=expert_axis)
            stacks[f"{part}_up"] = self._placed(up, by_out, stacked, first=expert_axis)
        return stacks

    def _of_norm(self, node: Mapping[str, Any], path: tuple[str, ...], loaded: Sequence[Loaded], number: int) -> Params:
        """Return the weights of norms, the model's where an adapter has none; nothing where no adapter has a part."""
        places = {part: locate((*path, part), values.shape) for part, values in node.items()}
        parts = {
            (part, at, each.number - 1): each.others.vectors[layer, place.name]
            for part, place in places.items()
            for at, layer in enumerate(place.layers or [None])
            for each in loaded
            if (layer, place.name) in each.others.vectors
        }
        if not parts:
            return {}
        stacks = {}
        for part, place in places.items():
            values = np.asarray(self.partitioner.fetch(node[part]), np.float32)
            own = np.repeat((values if place.stacked else values[None])[:, None], number, axis=1)
            source = self._sources((*path, part))[-1]
            for (of, at, index), vector in parts.items():
                if of == part:
                    own[at, index] = _spread(vector, source)
            stacks[part] = self._placed(own, _last_axis(node[part]), place.stacked)
        return stacks

    def _of_table(self, table: str, loaded: Sequence[Loaded], number: int) -> Params:
        """Return what `jaxinfer.models.own_tables` has of a table; nothing where no adapter changes it."""
        changes = {each.number - 1: each.others.tables[table] for each in loaded if table in each.others.tables}
        of_vocab = self._sources(("embed", "embedding"))[0]
        vocab = self.config.vocab_size if of_vocab is None else len(of_vocab)
        width = self.config.embedding_dim or self.config.model_dim
        stacks: Params = {}
        lows = {at: change.low for at, change in changes.items() if change.low is not None}
        if lows:
            rank = _filled(low.down_RI.shape[0] for low in lows.values())
            of_width, of_tokens = (np.zeros((number, rank, size), np.float32) for size in (width, vocab))
            for at, low in lows.items():
                of_width[at, : len(low.down_RI)] = low.down_RI
                of_tokens[at, : len(low.down_RI)] = _spread(low.up_OR.T, of_vocab)
            if table == HEAD:
                stacks = {"down": self._placed(of_width, None), "up": self._placed(of_tokens, TENSOR)}
            else:
                by_token = np.ascontiguousarray(of_tokens.swapaxes(1, 2))
                stacks = {"ranks": self._placed(by_token, TENSOR, axis=1), "up": self._placed(of_width, None)}
        rows = {at: change.rows for at, change in changes.items() if change.rows is not None}
        if rows:
            count = _filled(len(tokens) for tokens, _ in rows.values())
            tokens_NK, rows_NKD = np.full((number, count), -1, np.int32), np.zeros((number, count, width), np.float32)
            for at, (tokens, values) in rows.items():
                tokens_NK[at, : len(tokens)], rows_NKD[at, : len(tokens)] = tokens, values
            stacks |= {"tokens": self._whole(tokens_NK), "rows": self._placed(rows_NKD, None)}
        shifts = {each.number - 1: each.others.vectors.get((None, HEAD_SHIFT)) for each in loaded}
        if table == HEAD and any(shift is not None for shift in shifts.values()):
            shift_NV = np.zeros((number, vocab), np.float32)
            for at, shift in shifts.items():
                shift_NV[at] = 0 if shift is None else _spread(shift, of_vocab)
            stacks["shift"] = self._placed(shift_NV, TENSOR)
        copies = [(each.number - 1, each.copies[table]) for each in loaded if table in each.copies]
        if copies:
            copy_of_N = np.full(number, -1, np.int32)
            copy_of_N[[at for at, _ in copies]] = range(len(copies))
            stacks["copy_of"] = self._whole(copy_of_N)
            stacks |= {f"{COPY}{index}": table for index, (_, table) in enumerate(copies)}
        return stacks

    def _whole(self, values: np.ndarray) -> jax.Array:
        """Put an array on every device."""
        return jax.device_put(values) if self.partitioner.mesh is None else self.partitioner.place(values)

    def _sources(self, path: tuple[str, ...]) -> Any:
        """Return where the elements of a padded parameter come from, by axis."""
        if self.partitioner.tensor == 1:
            return None, None
        return reduce(lambda node, name: node[name], path, self._padding)

    @cached_property
    def _heads(self) -> int:
        """The number of query heads on all devices."""
        return pad_config(self.config, self.partitioner.tensor).num_heads

    @cached_property
    def _padding(self) -> Params:
        return self.partitioner.padding(self.config, self.backend)

    def _placed(
        self,
        stack: np.ndarray,
        split: str | None,
        of_layers: bool | None = None,
        axis: int = -1,
        first: str | None = None,
    ) -> jax.Array:
        """Put a stack on the devices, an axis of it split as the base's is.

        Its first axis is of layers, or of the one layer that a parameter belongs to; None: it has no such axis. The
        next one, of experts or heads, may be split too.
        """
        mesh = self.partitioner.mesh
        backend = self.partitioner.partition(self.config, self.backend).backend
        values = (stack[0] if of_layers is False else stack).astype(backend.compute_dtype)
        if mesh is None:
            return jax.device_put(values)
        axes: list[str | None] = [None] * values.ndim
        axes[axis] = split
        if first is not None:
            axes[1 if of_layers else 0] = first
        if of_layers and backend.stages > 1:
            axes[0] = PIPELINE
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.make_array_from_callback(values.shape, sharding, lambda part: values[part])


def _last_axis(parameter: Any) -> str | None:
    """Return the mesh axis that splits the last axis of a parameter."""
    sharding = parameter.sharding
    if not isinstance(sharding, NamedSharding) or len(sharding.spec) < parameter.ndim:
        return None
    return sharding.spec[-1]


def _spread(values: np.ndarray, source: np.ndarray | None) -> np.ndarray:
    """Return the last axis as a padded model has it."""
    if source is None:
        return values
    return np.where(source < 0, 0, np.take(values, np.maximum(source, 0), axis=-1))


def _filled(sizes: Any) -> int:
    return _power_of_two(max(_LEAST, *sizes, _LEAST))


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
