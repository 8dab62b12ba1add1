"""The supported architectures of GGUF files, by llama.cpp's names."""

from collections.abc import Mapping
from types import MappingProxyType

from jaxinfer.checkpoint.gguf.architectures.alibi import BLOOM, MPT
from jaxinfer.checkpoint.gguf.architectures.apertus import APERTUS
from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.bitnet import BITNET
from jaxinfer.checkpoint.gguf.architectures.command_r import COHERE2, COMMAND_R
from jaxinfer.checkpoint.gguf.architectures.deepseek2 import DEEPSEEK2
from jaxinfer.checkpoint.gguf.architectures.exaone4 import EXAONE4
from jaxinfer.checkpoint.gguf.architectures.further_mixtures import FURTHER_MIXTURES
from jaxinfer.checkpoint.gguf.architectures.gemma import GEMMA
from jaxinfer.checkpoint.gguf.architectures.gemma2 import GEMMA2
from jaxinfer.checkpoint.gguf.architectures.gemma3 import GEMMA3
from jaxinfer.checkpoint.gguf.architectures.glm4 import GLM4
from jaxinfer.checkpoint.gguf.architectures.gpt2 import GPT2
from jaxinfer.checkpoint.gguf.architectures.gpt_oss import GPT_OSS
from jaxinfer.checkpoint.gguf.architectures.gpt_relatives import FALCON, GPT_NEOX, STARCODER
from jaxinfer.checkpoint.gguf.architectures.granite import GRANITE, GRANITE_HYBRID
from jaxinfer.checkpoint.gguf.architectures.grouped_mixtures import GROUPED_MIXTURES
from jaxinfer.checkpoint.gguf.architectures.llama import LLAMA
from jaxinfer.checkpoint.gguf.architectures.llama4 import LLAMA4
from jaxinfer.checkpoint.gguf.architectures.llama_relatives import LLAMA_RELATIVES
from jaxinfer.checkpoint.gguf.architectures.minicpm3 import MINICPM3
from jaxinfer.checkpoint.gguf.architectures.mistral3 import MISTRAL3
from jaxinfer.checkpoint.gguf.architectures.mixtures import GRANITE_MOE, OLMOE, QWEN2_MOE, QWEN3_MOE, QWEN3_VL_MOE
from jaxinfer.checkpoint.gguf.architectures.namesakes import NAMESAKES
from jaxinfer.checkpoint.gguf.architectures.olmo2 import OLMO2
from jaxinfer.checkpoint.gguf.architectures.phi2 import PHI2
from jaxinfer.checkpoint.gguf.architectures.phi3 import PHI3
from jaxinfer.checkpoint.gguf.architectures.qwen2 import QWEN2, QWEN2_VL
from jaxinfer.checkpoint.gguf.architectures.qwen3 import QWEN3, QWEN3_VL
from jaxinfer.checkpoint.gguf.architectures.smollm3 import SMOLLM3
from jaxinfer.checkpoint.gguf.architectures.stablelm import STABLELM
from jaxinfer.checkpoint.gguf.architectures.starcoder2 import STARCODER2

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        found.name: found
        for found in (
            *(LLAMA, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, PHI2, PHI3, GPT2),
            *(QWEN2_MOE, QWEN3_MOE, OLMOE, GRANITE_MOE, GPT_OSS, DEEPSEEK2),
            *(FALCON, GPT_NEOX, STARCODER, APERTUS, EXAONE4, LLAMA4, QWEN2_VL, QWEN3_VL, GRANITE_HYBRID),
            *(*LLAMA_RELATIVES, *GROUPED_MIXTURES, BLOOM, MPT),
            *(*FURTHER_MIXTURES, MISTRAL3, QWEN3_VL_MOE, BITNET, MINICPM3, *NAMESAKES),
            *(OLMO2, SMOLLM3, GRANITE, GLM4, STABLELM, STARCODER2, COMMAND_R, COHERE2),
        )
    }
)
