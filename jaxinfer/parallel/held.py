"""Keeps what an engine holds between programs on a mesh: pools and caches by heads, and all else on every device.

Any row may use any page, and programs take any rows, so neither is split over an axis ``data``: an engine has a mesh
for each group of that axis (`jaxinfer.parallel.groups`).
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.cache.interface import Cache
from jaxinfer.cache.paged import Pool
from jaxinfer.errors import InvalidOption
from jaxinfer.notation import DATA, EXPERT, TENSOR
from jaxinfer.parallel.host_parts import HostParts, to_host
from jaxinfer.parallel.partitioner import Partitioner

# The axes of meshes that engines run on.
_AXES = DATA, EXPERT, TENSOR

_BY_HEADS = PartitionSpec(None, None, None, TENSOR)


class HeldPartitioner(Partitioner):
    """Places pools and rows instead of batches; without a mesh it changes nothing."""

    def check_axes(self) -> None:
        """Raise InvalidOption for a mesh on which an engine does not run."""
        mesh = self.mesh
        if mesh is None:
            return
        others = [
            f"{axis}={size}" for axis, size in mesh.shape.items() if axis not in (DATA, EXPERT, TENSOR) and size > 1
        ]
        if others:
            raise InvalidOption(f"an engine's mesh splits over data, expert and tensor alone, not {', '.join(others)}")

    def create(self, make: Callable[[], Any]) -> Any:
        """Create arrays in their placement."""
        if self.mesh is None:
            return make()
        return jax.jit(make, out_shardings=self._placements(jax.eval_shape(make)))()

    def kept_in_place(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a traceable function whose results are in their placement."""
        if self.mesh is None:
            return function

        @wraps(function)
        def kept(*arguments: Any) -> Any:
            results = function(*arguments)
            return jax.lax.with_sharding_constraint(results, self._placements(results))

        return kept

    def placed(self, tree: Any) -> Any:
        """Describe results where they are."""
        if self.mesh is None:
            return tree

        def described(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(described, tree, self._placements(tree))

    def to_host(self, tree: Any) -> Any:
        """Copy results to the host; of arrays that are split over processes, each process its own `HostParts`."""
        return jax.device_get(tree) if not self.is_multi_process else jax.tree.map(to_host, tree)

    def to_devices(self, tree: Any) -> Any:
        """Make whole arrays of what `to_host` returned where that is in parts."""
        return jax.tree.map(lambda leaf: leaf.on_devices() if isinstance(leaf, HostParts) else leaf, tree)

    def from_host(self, tree: Any) -> Any:
        """Return arrays of this host, the same ones in every process, as programs take them."""
        # JAX would take an array of one device for this process's alone.
        return jax.tree.map(np.asarray, tree) if self.is_multi_process else tree

    def _placements(self, tree: Any) -> Any:
        assert self.mesh is not None
        whole, by_heads = (NamedSharding(self.mesh, spec) for spec in (PartitionSpec(), _BY_HEADS))

        def of_node(node: Any) -> Any:
            if not isinstance(node, Pool | Cache):
                return whole
            return jax.tree.map(lambda leaf: by_heads if leaf.ndim == len(_BY_HEADS) else whole, node)

        return jax.tree.map(of_node, tree, is_leaf=lambda node: isinstance(node, Pool | Cache))
