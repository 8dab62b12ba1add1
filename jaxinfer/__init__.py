"""jaxinfer: TPU-first JAX inference in which every way of decoding faster leaves the text unchanged."""

from jaxinfer import errors
from jaxinfer.decoding.registry import describe_strategies as strategies
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.language_model import LanguageModel, load
from jaxinfer.models.config import DecoderConfig
from jaxinfer.results import GenerationResult, GenerationStats, StreamPiece
from jaxinfer.sampling.params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "DecoderConfig",
    "GenerationResult",
    "GenerationStats",
    "LanguageModel",
    "SamplingParams",
    "Strategy",
    "StreamPiece",
    "errors",
    "load",
    "strategies",
]
