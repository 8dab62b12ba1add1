"""jaxinfer: TPU-first JAX inference with decoding strategies that speed up decoding without changing its output."""

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jaxinfer import errors

if TYPE_CHECKING:
    from jaxinfer import distributed
    from jaxinfer.decoding.registry import describe_strategies as strategies
    from jaxinfer.decoding.strategy import Strategy
    from jaxinfer.grammar.grammar import Grammar
    from jaxinfer.language_model import LanguageModel
    from jaxinfer.model_loading import load
    from jaxinfer.model_quantization import quantize
    from jaxinfer.models.config import DecoderConfig
    from jaxinfer.parallel.mesh import MeshConfig
    from jaxinfer.results import GenerationResult, GenerationStats, StreamPiece
    from jaxinfer.sampling.params import SamplingParams
    from jaxinfer.text_values import Candidate

__version__ = "0.1.0"

__all__ = [
    "Candidate",
    "DecoderConfig",
    "GenerationResult",
    "GenerationStats",
    "Grammar",
    "LanguageModel",
    "MeshConfig",
    "SamplingParams",
    "Strategy",
    "StreamPiece",
    "distributed",
    "errors",
    "load",
    "quantize",
    "strategies",
]

# Imported on first use: the command line answers --help and mistakes without waiting for JAX.
_HOMES = MappingProxyType(
    {
        "Candidate": ("jaxinfer.text_values", "Candidate"),
        "DecoderConfig": ("jaxinfer.models.config", "DecoderConfig"),
        "GenerationResult": ("jaxinfer.results", "GenerationResult"),
        "GenerationStats": ("jaxinfer.results", "GenerationStats"),
        "Grammar": ("jaxinfer.grammar.grammar", "Grammar"),
        "LanguageModel": ("jaxinfer.language_model", "LanguageModel"),
        "MeshConfig": ("jaxinfer.parallel.mesh", "MeshConfig"),
        "SamplingParams": ("jaxinfer.sampling.params", "SamplingParams"),
        "Strategy": ("jaxinfer.decoding.strategy", "Strategy"),
        "StreamPiece": ("jaxinfer.results", "StreamPiece"),
        "load": ("jaxinfer.model_loading", "load"),
        "quantize": ("jaxinfer.model_quantization", "quantize"),
        "strategies": ("jaxinfer.decoding.registry", "describe_strategies"),
    }
)


def __getattr__(name: str) -> Any:
    if name == "distributed":
        return importlib.import_module("jaxinfer.distributed")
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
