"""The supported architectures of GGUF files, by llama.cpp's names."""

from collections.abc import Mapping
from types import MappingProxyType

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.gemma import GEMMA
from jaxinfer.checkpoint.gguf.architectures.gemma2 import GEMMA2
from jaxinfer.checkpoint.gguf.architectures.gemma3 import GEMMA3
from jaxinfer.checkpoint.gguf.architectures.gpt2 import GPT2
from jaxinfer.checkpoint.gguf.architectures.llama import LLAMA
from jaxinfer.checkpoint.gguf.architectures.phi2 import PHI2
from jaxinfer.checkpoint.gguf.architectures.phi3 import PHI3
from jaxinfer.checkpoint.gguf.architectures.qwen2 import QWEN2
from jaxinfer.checkpoint.gguf.architectures.qwen3 import QWEN3

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {found.name: found for found in (LLAMA, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, PHI2, PHI3, GPT2)}
)
