"""The ways to choose codes on calibration texts, by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from jaxinfer.models.config import DecoderConfig
from jaxinfer.notation import Array, Float, Params
from jaxinfer.ops.few_bits.formats import Format
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.ops.few_bits.round_to_nearest import round_to_nearest
from jaxinfer.quantization.awq import quantize_clipped, scales_for
from jaxinfer.quantization.descent import quantize_with_descent
from jaxinfer.quantization.folding import scale_inputs
from jaxinfer.quantization.seen import Method, Place, Seen
from jaxinfer.quantization.smoothing import smoothing_factors
from jaxinfer.quantization.sparsegpt import prune_by_sparsegpt

# Queries and keys are not cut: what they lose, scores multiply.
_UNCUT = ("query", "key")


@dataclass(frozen=True)
class _Rounding:
    """What all methods have in common: a form, and what becomes of a kernel of which nothing is known."""

    form: Format

    def prepare(self, config: DecoderConfig, block: Params, seen: Callable[[Place], Seen]) -> Params:
        """Change nothing."""
        return block

    def factors(self, kernels: Sequence[Float[Array, "_ K"]], seen: Callable[[], Seen]) -> Float[Array, " K"] | None:
        """Change nothing."""
        return None

    def nearest(self, kernel: Float[Array, "N K"]) -> QuantizedArray:
        """Return a kernel rounded to the nearest."""
        return round_to_nearest(kernel, self.form)


@dataclass(frozen=True)
class Gptq(_Rounding):
    """Weights that are left make up for the errors of those that are rounded."""

    def choose(self, place: Place, kernel: Float[Array, "N K"], seen: Seen) -> QuantizedArray:
        """Return a kernel in few bits."""
        return quantize_with_descent(kernel, seen.squares_KK, self.form)


@dataclass(frozen=True)
class Awq(_Rounding):
    """Large inputs are scaled up, what feeds them down, and weights are cut and rounded."""

    def prepare(self, config: DecoderConfig, block: Params, seen: Callable[[Place], Seen]) -> Params:
        """Scale the inputs of linear layers."""

        def choose(places: Sequence[Place], kernels: Sequence[Array]) -> Array:
            found = seen(places[0])
            return scales_for(kernels, found.squares_KK, found.sizes_K, self.form)

        return scale_inputs(config, block, choose)

    def factors(self, kernels: Sequence[Float[Array, "_ K"]], seen: Callable[[], Seen]) -> Float[Array, " K"] | None:
        """Return the factors of the inputs of an expert's last layer."""
        found = seen()
        return scales_for(kernels, found.squares_KK, found.sizes_K, self.form)

    def choose(self, place: Place, kernel: Float[Array, "N K"], seen: Seen) -> QuantizedArray:
        """Return a kernel in few bits."""
        if place[-1] in _UNCUT:
            return self.nearest(kernel)
        return quantize_clipped(kernel, seen.squares_KK, self.form)


@dataclass(frozen=True)
class AwqGptq(Awq):
    """Large inputs are scaled up, what feeds them down, and weights that are left make up for errors."""

    def choose(self, place: Place, kernel: Float[Array, "N K"], seen: Seen) -> QuantizedArray:
        """Return a kernel in few bits."""
        return quantize_with_descent(kernel, seen.squares_KK, self.form)


@dataclass(frozen=True)
class SmoothQuant(_Rounding):
    """Large inputs are scaled down and their weights up, so that rows in int8 lose less; then weights are rounded."""

    def prepare(self, config: DecoderConfig, block: Params, seen: Callable[[Place], Seen]) -> Params:
        """Scale the inputs of linear layers."""

        def choose(places: Sequence[Place], kernels: Sequence[Array]) -> Array:
            return smoothing_factors(kernels, seen(places[0]).most_K)

        return scale_inputs(config, block, choose)

    def choose(self, place: Place, kernel: Float[Array, "N K"], seen: Seen) -> QuantizedArray:
        """Return a kernel in few bits."""
        return self.nearest(kernel)


@dataclass(frozen=True)
class SparseGpt(_Rounding):
    """Weights that are kept make up for those that are not."""

    def choose(self, place: Place, kernel: Float[Array, "N K"], seen: Seen) -> QuantizedArray:
        """Return a sparse kernel."""
        return prune_by_sparsegpt(kernel, seen.squares_KK, self.form)


# What sparse weights are chosen by.
SPARSE = ("sparsegpt",)
METHODS: Mapping[str, Callable[[Format], Method]] = MappingProxyType(
    {"gptq": Gptq, "awq": Awq, "awq+gptq": AwqGptq, "smoothquant": SmoothQuant, "sparsegpt": SparseGpt}
)
