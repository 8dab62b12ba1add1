"""Every variant that is held to Hugging Face transformers, by name; a file a family."""

from collections.abc import Mapping

from tests.models.variants import gemma, gpt2, llama, mistral, olmo, opt, phi, phi3, qwen
from tests.models.variants.variant import Variant

VARIANTS: Mapping[str, Variant] = {
    **llama.VARIANTS,
    **gemma.VARIANTS,
    **gpt2.VARIANTS,
    **mistral.VARIANTS,
    **olmo.VARIANTS,
    **opt.VARIANTS,
    **phi.VARIANTS,
    **phi3.VARIANTS,
    **qwen.VARIANTS,
}
