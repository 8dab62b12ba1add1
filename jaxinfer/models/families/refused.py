"""The ``model_type`` of well-known models that are not supported, and what they are."""

from collections.abc import Mapping
from types import MappingProxyType

_EXPERTS = """
    jetmoe kimi_k25 longcat_flash bailing_moe cohere2_moe aria_text beam
    flint kolibri1 laguna mimo_v2_flash sarvam_moe sarvam_mla axk1
"""
_STATE_SPACE = """
    mamba mamba2 falcon_mamba jamba zamba zamba2 bamba falcon_h1 nemotron_h rwkv xlstm recurrent_gemma zaya
"""
_LINEAR = """
    qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen4_exp qwen4_exp_text minimax kimi_linear
    olmo_hybrid bailing_hybrid lara_mini lfm2 lfm2_moe lfm3 inkling_text inkling2_text inkling2_loop_text
"""
_CHOOSING = """
    deepseek_v32 deepseek_v4 glm_moe_dsa axk2 hy_v4 dots3_note dots3_note_text minimax_m3_vl_text reformer big_bird
"""
_LOOPED = """
    dory hrm_text
"""
_OTHERS = """
    cpmant ctrl diffllama doge gpt_neox_japanese xlnet xlm blt modernbert-decoder bert-generation roformer
    gemma4_assistant gemma4_unified_assistant
"""
_ENCODER_DECODER = """
    t5 mt5 umt5 byt5 bart mbart pegasus blenderbot blenderbot-small m2m_100 marian switch_transformers longt5 t5gemma
    t5gemma2 whisper encoder_decoder bigbird_pegasus mvp plbart prophetnet trocr
"""
_ENCODER = """
    bert roberta xlm-roberta xlm-roberta-xl distilbert deberta deberta-v2 electra albert modernbert mpnet nomic_bert
    camembert data2vec-text ernie megatron-bert rembert roberta-prelayernorm roc_bert xmod
"""
_VISION = """
    llava_onevision mllama idefics idefics2 paligemma gemma3n gemma3n_text gemma4 gemma4_text
    gemma4_unified gemma4_unified_text glm4v glm46v pixtral kimi_vl phi4_multimodal phi3_v molmo2 janus fuyu blip-2
    qwen2_5_omni qwen3_omni_moe apertus1p5_text cohere_compass emu3 git got_ocr2 moshi moss_transcribe_diarize
    musicgen musicgen_melody
"""

WHAT: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(_EXPERTS.split(), "a mixture of experts of another kind"),
        **dict.fromkeys(_STATE_SPACE.split(), "a model with state-space or recurrent layers"),
        **dict.fromkeys(_LINEAR.split(), "a model with linear attention or convolutions"),
        **dict.fromkeys(_CHOOSING.split(), "a model whose attention chooses among earlier tokens"),
        **dict.fromkeys(_LOOPED.split(), "a model that runs its layers several times"),
        **dict.fromkeys(_OTHERS.split(), "a decoder of another kind"),
        **dict.fromkeys(_ENCODER_DECODER.split(), "a model with an encoder and a decoder"),
        **dict.fromkeys(_ENCODER.split(), "an encoder without a decoder"),
        **dict.fromkeys(_VISION.split(), "a model of images, sound or video beside text"),
    }
)
