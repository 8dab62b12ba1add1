"""The factors that were folded into a model's blocks, for adapters of the model as it was before.

`jaxinfer.quantization.folding` multiplies the weights of an input, and divides what feeds that input: a norm, the
values, the factor beside a gate. A block's output stays the same, but inside it some numbers are divided. What was
trained on the model before reads them as they were, and adds to them as they were.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.layers import EXPERTS
from jaxinfer.notation import Params

# The name of a block's factors among its parameters, while a method makes them.
FOLDED = "folded"
# What reads an attention's and a feed-forward layer's norm.
_ATTENTION, _MLP = "attention.inputs", "mlp.inputs"
_READERS: Mapping[str, str] = {
    **{f"attention.{name}": _ATTENTION for name in ("query", "key", "value", "gate")},
    **{f"mlp.{name}": _MLP for name in ("router", "shared_gate")},
    **{f"mlp.{inside}{name}": _MLP for inside in ("", "shared.", f"{EXPERTS}.") for name in ("gate", "up")},
}
# What is divided, and whose inputs that makes.
_FED: Mapping[str, str] = {
    "attention_norm": _ATTENTION,
    "mlp_norm": _MLP,
    "attention.value": "attention.output",
    **{f"mlp.{inside}up": f"mlp.{inside}down" for inside in ("", "shared.", f"{EXPERTS}.")},
}


@dataclass(frozen=True, eq=False)
class Folded:
    """What inputs were divided by, and their weights multiplied; of experts' down ``[E, inputs]``, else ``[inputs]``.

    ``factors`` have names such as ``3.attention.inputs``. None: something may have been folded, and what is not known.
    """

    factors: Mapping[str, np.ndarray] | None

    @classmethod
    def of(cls, blocks: Sequence[Params]) -> "Folded | None":
        """Return the factors that blocks have among their parameters, None if nothing was folded."""
        each = [(layer, block.get(FOLDED, {})) for layer, block in enumerate(blocks)]
        factors = {f"{layer}.{name}": np.asarray(value) for layer, found in each for name, value in found.items()}
        return cls(factors) if factors else None

    def inputs(self, layer: int, name: str) -> np.ndarray | None:
        """Return what the inputs of a linear layer of a block were divided by, None for nothing."""
        return self._find(layer, _READERS.get(name, name))

    def outputs(self, layer: int, name: str) -> np.ndarray | None:
        """Return what the outputs of a norm or a linear layer of a block were divided by, None for nothing."""
        return self._find(layer, _FED[name]) if name in _FED else None

    def first(self, num_layers: int) -> "Folded":
        """Return those of the first layers."""
        if self.factors is None:
            return self
        return Folded({name: self.factors[name] for name in self.factors if int(name.partition(".")[0]) < num_layers})

    def _find(self, layer: int, name: str) -> np.ndarray | None:
        return None if self.factors is None else self.factors.get(f"{layer}.{name}")


def joined(earlier: Folded | None, later: Folded | None) -> Folded | None:
    """Return the factors of a model that was folded once more."""
    if earlier is None or later is None:
        return earlier or later
    if earlier.factors is None or later.factors is None:
        return Folded(None)
    both = {name: earlier.factors[name] for name in earlier.factors}
    for name, value in later.factors.items():
        both[name] = both[name] * value if name in both else value
    return Folded(both)


def folded_adapters(adapters: Params, folded: Folded | None, first: int, power: int = 1) -> Params:
    """Return adapters of the last layers, from ``first`` on, for a model into which factors have been folded.

    They are stacked over these layers (`jaxinfer.models.adapters.adapter_shapes`). The power -1 leads back.
    """

    if folded is None:
        return adapters
    inputs, outputs = folded.inputs, folded.outputs

    def scaled(path: Any, leaf: Any) -> Any:
        *module, _, part = (key.key for key in path)
        name, values = ".".join(module), np.array(leaf, np.float32)
        for at, layer in enumerate(range(first, first + len(values))):
            factors = inputs(layer, name) if part == "down" else outputs(layer, name)
            if factors is not None:
                values[at] *= factors**power if part == "down" else factors[:, None] ** -power
        return jnp.asarray(values, leaf.dtype)

    return jax.tree_util.tree_map_with_path(scaled, adapters)


def names_of_inputs(places: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield the names under which a block keeps the factors of what these linear layers read."""
    names = (".".join(place) for place in places)
    yield from dict.fromkeys(_READERS.get(name, name) for name in names)


def with_factors(block: Mapping[str, Any], places: Sequence[tuple[str, ...]], factors: Any) -> Params:
    """Return a block that also has, among its parameters, what inputs of these linear layers were divided by."""
    return {**block, FOLDED: {**block.get(FOLDED, {}), **dict.fromkeys(names_of_inputs(places), factors)}}
