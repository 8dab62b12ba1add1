"""Every variant that is held to Hugging Face transformers, by name; a file a family."""

from collections.abc import Mapping

from tests.models.variants import (
    apertus,
    experts,
    falcon,
    gemma,
    glm,
    gpt2,
    gpt_neox,
    gpt_relatives,
    granite,
    latent,
    llama,
    llama4,
    mistral,
    mixtures,
    nemotron,
    olmo,
    opt,
    phi,
    phi3,
    qwen,
    relatives,
    stablelm,
)
from tests.models.variants.variant import Variant

VARIANTS: Mapping[str, Variant] = {
    **llama.VARIANTS,
    **apertus.VARIANTS,
    **experts.VARIANTS,
    **falcon.VARIANTS,
    **gemma.VARIANTS,
    **glm.VARIANTS,
    **gpt2.VARIANTS,
    **gpt_neox.VARIANTS,
    **gpt_relatives.VARIANTS,
    **granite.VARIANTS,
    **latent.VARIANTS,
    **llama4.VARIANTS,
    **mistral.VARIANTS,
    **mixtures.VARIANTS,
    **nemotron.VARIANTS,
    **olmo.VARIANTS,
    **opt.VARIANTS,
    **phi.VARIANTS,
    **phi3.VARIANTS,
    **qwen.VARIANTS,
    **relatives.VARIANTS,
    **stablelm.VARIANTS,
}
