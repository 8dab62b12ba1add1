"""The architectures of GGUF files that can be read, by llama.cpp's name of each."""

from collections.abc import Mapping
from types import MappingProxyType

from jaxinfer.checkpoint.gguf_architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf_architectures.gemma import GEMMA
from jaxinfer.checkpoint.gguf_architectures.gemma2 import GEMMA2
from jaxinfer.checkpoint.gguf_architectures.gemma3 import GEMMA3
from jaxinfer.checkpoint.gguf_architectures.gpt2 import GPT2
from jaxinfer.checkpoint.gguf_architectures.llama import LLAMA
from jaxinfer.checkpoint.gguf_architectures.phi2 import PHI2
from jaxinfer.checkpoint.gguf_architectures.phi3 import PHI3
from jaxinfer.checkpoint.gguf_architectures.qwen2 import QWEN2
from jaxinfer.checkpoint.gguf_architectures.qwen3 import QWEN3

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {found.name: found for found in (LLAMA, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, PHI2, PHI3, GPT2)}
)
