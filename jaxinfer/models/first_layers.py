"""A model's first layers as a model: its early exit, with its own weights and adapters."""

from dataclasses import dataclass

from jaxinfer.cache.interface import LayeredCache, Placement
from jaxinfer.models.config import shallower
from jaxinfer.models.decoder import create_cache
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.split_tokens import enter_region


@dataclass(frozen=True)
class FirstLayers(Model):
    """The first ``num_layers`` of a model, its final norm and its output matrix; weights stay where they are."""

    num_layers: int = 1

    def forward(
        self,
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
        cache: LayeredCache,
        placements: tuple[Placement, ...],
        context_lengths_B: Int[Array, " B"],
    ) -> tuple[Float[Array, "B T D"], LayeredCache]:
        # Kinds of later layers have no cache and need no places.
        placements += placements[:1] * (len(self.config.kinds) - len(placements))
        hidden_BTD = self.embedded(tokens_BT, positions_BT)
        if self.decoder.backend.stages == 1:
            hidden_BTD = enter_region(hidden_BTD, placements[0].seen, self.decoder.backend)
        inputs = hidden_BTD, positions_BT, cache, placements, context_lengths_B
        hidden_BTD, cache = self.run_layers(0, self.num_layers, *inputs)
        return self.normed(hidden_BTD), cache

    def create_cache(self, batch: int, num_slots: int, headroom: int) -> LayeredCache:
        """Return an empty cache; see `jaxinfer.models.decoder.create_cache`."""
        backend = self.decoder.backend
        # The stages of a pipeline hold equal parts of all layers.
        config = shallower(self.config, self.num_layers) if backend.stages == 1 else self.config
        return create_cache(config, batch, num_slots, backend, headroom)
