"""What one adapter changes beside the kernels of a model's blocks, in the order of the model's parameters.

That are vectors, the weights of norms and what is added to the outputs of linear layers, and the two tables: the
embedding and the output matrix.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from jaxinfer.adapter_basis import AdapterBasis
from jaxinfer.checkpoint.adapters.low_rank import LowRank
from jaxinfer.checkpoint.adapters.merged import MergedTensors
from jaxinfer.checkpoint.adapters.other_tensors import HEAD as TIED_HEAD
from jaxinfer.checkpoint.adapters.other_tensors import Change
from jaxinfer.checkpoint.adapters.peft_folder import Adapter
from jaxinfer.checkpoint.leaves import Leaf, list_leaves
from jaxinfer.checkpoint.load import each_param
from jaxinfer.checkpoint.loaded import LoadedTensors
from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.errors import UnsupportedModel
from jaxinfer.models.adapters import ADAPTED_NAMES, EMBED, HEAD
from jaxinfer.models.families.family import Part, TensorNames
from jaxinfer.models.layers import EXPERTS, locate
from jaxinfer.notation import Params

# What is added to the logits, by its name among vectors.
HEAD_SHIFT = "head.shift"
_OF_TABLES: Mapping[tuple[str, ...], str] = {("embed", "embedding"): EMBED, ("head", "kernel"): HEAD}


@dataclass(frozen=True)
class OwnParts:
    """An adapter's vectors by layer (None: of no block) and name, and its changes of tables.

    A linear layer's ``NAME.shift`` is added to its outputs; a norm has ``NAME.scale`` and ``NAME.bias``. ``pairs`` are
    what is added to routers' matrices, whose expert is 0, and to experts', by layer, parameter and expert.
    """

    vectors: Mapping[tuple[int | None, str], np.ndarray] = field(default_factory=dict)
    pairs: Mapping[tuple[int, str, int], LowRank] = field(default_factory=dict)
    tables: Mapping[str, Change] = field(default_factory=dict)


def own_parts(
    adapter: Adapter, base: LoadedTensors, names: TensorNames, abstract: Params, basis: AdapterBasis
) -> OwnParts:
    """Return what an adapter changes, beside what ``base`` has; ``abstract`` describes unpadded parameters.

    ``basis`` says what has been folded into these. Raises UnsupportedModel for what can only be merged.
    """
    leaves = _leaves_of(adapter.changes, names, abstract)
    tables: dict[str, Change] = {}
    of_vectors: dict[tuple[str, ...], Leaf] = {}
    pairs: dict[tuple[int, str, int], LowRank] = {}
    for tensor, change in adapter.changes.items():
        if tensor == TIED_HEAD and not leaves[tensor] and _can_be_own(change):
            tables[HEAD] = change
            continue
        for leaf in leaves[tensor] or [None]:
            path = () if leaf is None else leaf.path
            if leaf is not None and path in _OF_TABLES and _can_be_own(change):
                tables[_OF_TABLES[path]] = _beside_base(change, base, tensor, leaf)
            elif leaf is not None and change.low is None and _is_vector(path):
                of_vectors[path] = leaf
            elif leaf is not None and change.low is not None and _is_pair(leaf, change):
                layers, _, name, _ = locate(path, leaf.struct.shape)
                places = {
                    (layer, name, expert): change.low
                    for layer, parts in zip(layers or (), leaf.sources)
                    for expert, part in enumerate(parts)
                    if part.tensor == tensor
                }
                pairs |= places
            elif leaf is not None and change.experts and leaf.path[-2] == EXPERTS:
                layers, _, name, _ = locate(path, leaf.struct.shape)
                at = next(at for at, parts in enumerate(leaf.sources) if parts[0].tensor == tensor)
                pairs |= {
                    ((layers or ())[at], name, expert): low.of_part(leaf.sources[at][0], leaf.shape[-2])
                    for expert, low in enumerate(change.experts)
                }
            else:
                raise UnsupportedModel(
                    f"{adapter.origin}: it changes {tensor}, which can only be merged: jaxinfer convert SRC DST "
                    "--adapter PATH"
                )
    of_head, rows = tables.get(HEAD, Change()), tables.get(EMBED, Change()).rows
    if "head.kernel" not in names.top and rows is not None and of_head.rows is None:
        # PEFT writes rows of a table that is both to both, unless the output matrix has its own.
        tables[HEAD] = replace(of_head, rows=rows)
    tables = {table: change for table, change in tables.items() if change.arrays}
    vectors = _vectors(adapter, base, names, of_vectors, basis)
    pairs = {place: basis.of_pair(*place, low) for place, low in pairs.items()}
    low = tables[HEAD].low if HEAD in tables else None
    if low is not None and low.shift_O is not None:
        vectors[None, HEAD_SHIFT] = vectors.get((None, HEAD_SHIFT), np.float32(0)) + low.shift_O
    return OwnParts(vectors, pairs, tables)


def _leaves_of(tensors: Mapping[str, Any], names: TensorNames, abstract: Params) -> dict[str, list[Leaf]]:
    """Return the parameters that each tensor has a part in."""
    found: dict[str, list[Leaf]] = {tensor: [] for tensor in tensors}
    for leaf in list_leaves(abstract, names, None):
        for tensor in {part.tensor for parts in leaf.sources for part in parts} & found.keys():
            found[tensor].append(leaf)
    return found


def _can_be_own(change: Change) -> bool:
    return change.low is None or change.low.magnitude_O is None


def _is_pair(leaf: Leaf, change: Change) -> bool:
    """Tell whether a row can have its own of a matrix: a router's, a shared expert's gate, or one expert's alone."""
    is_matrix = leaf.path[-2:] in (("router", "weights"), ("shared_gate", "weights")) or (
        leaf.path[-2] == EXPERTS and leaf.is_matrix_each
    )
    is_plain = all(part == Part(part.tensor) for parts in leaf.sources for part in parts)
    low = change.low
    return (
        is_matrix
        and is_plain
        and low is not None
        and len(change.arrays) == 2
        and low.shift_O is None
        and _can_be_own(change)
    )


def _is_vector(path: tuple[str, ...]) -> bool:
    """Tell whether a row can have its own of a parameter: a norm's weights, or a bias that is added at last."""
    _, _, name, _ = locate((*path[:-1], "kernel"), (1,))
    module, of = name.removesuffix(".kernel"), path[-1]
    return path == ("head_bias", "bias") or (
        (module.endswith("norm") and of in ("scale", "bias")) or (module in ADAPTED_NAMES and of == "bias")
    )


def _beside_base(change: Change, base: LoadedTensors, tensor: str, leaf: Leaf) -> Change:
    """Return a table's change without a copy of what the model has: PEFT saves the tables below low ranks, too."""
    if change.whole is None:
        return change
    dtype = np.dtype(leaf.struct.dtype)
    is_same = np.array_equal(change.whole.astype(dtype), base.read(tensor, dtype))
    return replace(change, whole=None) if is_same else change


def _vectors(
    adapter: Adapter,
    base: LoadedTensors,
    names: TensorNames,
    leaves: Mapping[tuple[str, ...], Leaf],
    basis: AdapterBasis,
) -> dict[tuple[int | None, str], np.ndarray]:
    """Read the changed vectors; a bias as the difference from the model's."""
    wide: Params = {}
    for path, leaf in leaves.items():
        node = wide
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = jax.ShapeDtypeStruct(leaf.struct.shape, np.dtype(np.float32))
    before, after = (
        dict(each_param(Checkpoint(adapter.origin, {}, tensors), names, wide))
        for tensors in (base, MergedTensors(base, adapter))
    )
    found: dict[tuple[int | None, str], np.ndarray] = {}
    for path, leaf in leaves.items():
        layers, _, name, _ = locate(path, leaf.struct.shape)
        is_added = not name.split(".")[-2].endswith("norm")
        values, was = np.asarray(after[path]), np.asarray(before[path])
        shift = HEAD_SHIFT if layers is None else name.removesuffix("bias") + "shift"
        for at, layer in enumerate(layers or [None]):
            if any(part.tensor in adapter.changes for part in leaf.sources[at]):
                own, base_own = (each[at] if leaf.stacked else each for each in (values, was))
                own = basis.of_vector(layer, name, own)
                found[layer, shift if is_added else name] = own - base_own if is_added else own
    return found
