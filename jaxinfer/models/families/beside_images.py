"""Mistral 3, LLaVA, InternVL, Aya Vision, SmolVLM and Qwen-VL: text decoders whose vision model is left out."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from jaxinfer.errors import UnsupportedModel
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import cohere, qwen_moe
from jaxinfer.models.families.family import TEXT_ALONE, Family, TensorNames
from jaxinfer.models.families.keys.beside_images import USUAL, without_image_positions
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.generic_keys import OUTER_KEYS
from jaxinfer.models.families.keys.llama_names import tensor_names
from jaxinfer.models.families.llama import LLAMA
from jaxinfer.models.families.mistral import MINISTRAL3, MISTRAL
from jaxinfer.models.families.qwen import QWEN2, QWEN3

# A text model's own word for its kind, and the family that it is.
_NAMED_AS_LLAMA = {one.model_type: one for one in (LLAMA, MISTRAL, MINISTRAL3, QWEN2, QWEN3)}
# Text models that are none of these, by what they usually are, and their tensors' names.
_OTHERS: Mapping[str, tuple[Mapping[str, Family], Callable[[DecoderConfig], TensorNames]]] = {
    "cohere2": ({"cohere2": cohere.COHERE2}, cohere.tensor_names),
    "qwen3_moe": ({"qwen3_moe": qwen_moe.QWEN3_MOE}, qwen_moe.beside_images_names),
}
_OF_IMAGES = (
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|connector)\..*",
    r"(model\.)?image_newline",
)


def _translate(model_type: str, known: Mapping[str, Family], usual: str, config: Mapping[str, Any]) -> DecoderConfig:
    """Translate the text decoder of a ``config.json`` of this ``model_type``."""
    reader = ConfigReader(config, family=model_type)
    is_flat = "text_config" not in config and usual == "qwen2" and model_type != "internvl"
    if not is_flat and reader.section("text_config") is None:
        raise UnsupportedModel(f"config.json ({model_type}): text_config is missing or empty")
    # The first files of Qwen2-VL have the text decoder's keys beside the others.
    text = dict(config.get("text_config") or {key: config[key] for key in config if key not in OUTER_KEYS})
    word = text.pop("model_type", usual)
    family = known.get(word) or (known.get(usual) if word.startswith(model_type) else None)
    if family is None:
        raise reader.refuse("text_config.model_type", word, f"known words are {', '.join(known)}")
    numbers, theta = USUAL.get(model_type, ({}, None))
    if "num_local_experts" in text:  # transformers 5's other word
        numbers = {key: number for key, number in numbers.items() if key != "num_experts"}
    base = {} if theta is None or "rope_parameters" in text else {"rope_theta": theta}
    decoder = family.translate(without_image_positions({**numbers, **base, **text, "architectures": None}))
    own = ConfigReader({key: config[key] for key in config if key in OUTER_KEYS or "text_config" in config}, model_type)
    own.section("text_config")
    return own.finish(
        replace(
            decoder,
            family=model_type,
            tied_embeddings=own.boolean("tie_word_embeddings", default=False) or decoder.tied_embeddings,
            bos_token_id=own.optional_token("bos_token_id", default=decoder.bos_token_id),
            eos_token_ids=own.tokens("eos_token_id", default=decoder.eos_token_ids),
        )
    )


def _names(base: Callable[[DecoderConfig], TensorNames], first: str, other: str, config: DecoderConfig) -> TensorNames:
    """Name the tensors: the text family's behind a prefix; where both stand, that of the output matrix moves too."""
    names = base(config).moved("model.", first)
    top, other_head = dict(names.top), ""
    if first.startswith("language_model.") and "head.kernel" in top:
        top["head.kernel"], other_head = "language_model.lm_head.weight", "lm_head.weight"
    # A tied output matrix that is stored all the same is not left out: it may be another one.
    spelled = {"optional_prefix": first, "other_prefix": other, "other_head": other_head}
    return replace(names, top=top, ignored=_OF_IMAGES, notice=TEXT_ALONE, **spelled)


def _family(model_type: str, architecture: str, usual: str, first: str, other: str = "model.language_model.") -> Family:
    known, base = _OTHERS.get(usual, (_NAMED_AS_LLAMA, tensor_names))
    return Family(
        model_type,
        (f"{architecture}ForConditionalGeneration",),
        partial(_translate, model_type, known, usual),
        partial(_names, base, first, other),
    )


_TOWER = "language_model.model."
BESIDE_IMAGES = (
    _family("mistral3", "Mistral3", "mistral", _TOWER),
    _family("llava", "Llava", "llama", _TOWER),
    _family("llava_next", "LlavaNext", "llama", _TOWER),
    _family("internvl", "InternVL", "qwen2", _TOWER),
    _family("aya_vision", "AyaVision", "cohere2", _TOWER),
    _family("cohere2_vision", "Cohere2Vision", "cohere2", _TOWER),
    _family("idefics3", "Idefics3", "llama", "model.text_model.", "model.text_model."),
    _family("smolvlm", "SmolVLM", "llama", "model.text_model.", "model.text_model."),
    _family("qwen2_vl", "Qwen2VL", "qwen2", "model.language_model.", "model."),
    _family("qwen2_5_vl", "Qwen2_5_VL", "qwen2", "model.language_model.", "model."),
    _family("qwen3_vl", "Qwen3VL", "qwen3", "model.language_model.", "model."),
    _family("qwen3_vl_moe", "Qwen3VLMoe", "qwen3_moe", "model.language_model.", "model."),
)
