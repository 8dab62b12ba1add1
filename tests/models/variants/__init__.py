"""Every variant that is held to Hugging Face transformers, by name; a file a family."""

from collections.abc import Mapping

from tests.models.variants import llama
from tests.models.variants.variant import Variant

VARIANTS: Mapping[str, Variant] = {**llama.VARIANTS}
