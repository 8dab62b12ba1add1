"""``config.json`` keys that do not change the network; transformers 4 and 5 write them for every model."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_IDENTITY = """
    architectures model_type dtype torch_dtype transformers_version name_or_path _name_or_path _commit_hash
    tokenizer_class attn_implementation _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled
    transformers_weights transformers.js_config unsloth_fixed unsloth_version
"""

_TRAINING = """
    initializer_range gradient_checkpointing finetuning_task problem_type id2label label2id num_labels
    task_specific_params
"""

_RUNTIME = """
    use_cache return_dict output_hidden_states output_attentions torchscript use_bfloat16 tf_legacy_loss
    chunk_size_feed_forward is_decoder tie_last_hidden_states pad_token_id sep_token_id decoder_start_token_id
"""

# Defaults of text generation, which transformers 4 stored beside the network's keys.
_GENERATION = """
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p min_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens prefix
"""

GENERIC_KEYS = frozenset(f"{_IDENTITY} {_TRAINING} {_RUNTIME} {_GENERATION}".split())

# Keys that have no effect at these values; any other value means another network.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "add_cross_attention": (False,),
        "cross_attention_hidden_size": (None,),
        "is_encoder_decoder": (False,),
        "tie_encoder_decoder": (False,),
        "pruned_heads": (None, {}),
        "per_layer_config": (None, {}),
        "quantization_config": (None,),
        "sliding_window": (None,),
        "use_sliding_window": (False,),
        "rope_interleaved": (False,),
        "partial_rotary_factor": (None, 1.0, 1),
        "learned_embeddings": (True,),
        "scale_embeddings": (False,),
        "layer_types": (None,),
        "use_mrope": (False,),
        "use_bidirectional_attention": (None, False),
        "qk_layernorm": (False,),
        "clip_qkv": (None,),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "lm_head_bias": (False,),
        "full_attn_mod": (1,),
        "no_rope_layers": (None,),
        "moe_layers": (None,),
        "moe_layer_end_index": (None,),
        "interpolate_factor": (1,),
    }
)

# Falcon 3 also names the gated activation that all have.
_LLAMA = "attention_dropout pretraining_tp max_sequence_length is_llama_config activation"

# Dropout, the summary head of another model class, and sizes that repeat n_positions.
_GPT2 = """
    resid_pdrop embd_pdrop attn_pdrop summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj n_ctx n_special predict_special_tokens output_past _num_labels
"""

# Words that repeat what others say, and where the model's own code is.
_FALCON = "hidden_dropout auto_map ff_factor apply_residual_connection_post_layernorm"
# How the first programs laid out their memory, and in which type a softmax was computed.
_GPT_BIGCODE = """
    attention_softmax_in_fp32 scale_attention_softmax_in_fp32 inference_runner max_batch_size max_sequence_length
    pad_key_length pre_allocate_kv_cache validate_runner_input
"""

# Dropout, and the references to the model's own code that wrote the first files.
_PHI = frozenset({"attention_dropout", "resid_pdrop", "embd_pdrop", "auto_map"})

_DROPOUT = frozenset({"attention_dropout"})

# Pretraining, and words of the first files that the network does not follow.
_SMOLLM3 = frozenset({"max_window_layers", "pretraining_tp"})
_STARCODER2 = """
    residual_dropout embedding_dropout attention_softmax_in_fp32 scale_attention_softmax_in_fp32 scale_attn_weights
    layer_norm_epsilon mlp_type norm_type
"""
_COHERE2 = """
    cache_implementation layer_switch order_of_interleaved_layers position_embedding_type rotary_pct
    use_embedding_sharing use_gated_activation use_parallel_block use_parallel_embedding
"""

# The state-space layers and experts that a model does not have, and their training.
_GRANITE_HYBRID = """
    mamba_chunk_size mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state mamba_expand mamba_n_groups mamba_n_heads
    mamba_proj_bias time_step_limit time_step_min time_step_max time_step_floor num_experts_per_tok
    output_router_logits router_aux_loss_coef init_method normalization_function intermediate_size
"""

# Dropout, and how experts were trained.
_EXPERTS = _DROPOUT | {"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"}

# A second name of a key that is read, and the length that the rotation was trained for, which its section has too.
_GPT_OSS = frozenset({"experts_per_token", "initial_context_length"})
# Training, and where the model's own code is.
_DEEPSEEK = _EXPERTS | {"aux_loss_alpha", "auto_map", "ep_size", "pretraining_tp", "seq_aux"}

# Layers that predict further tokens, and where the model's own code is.
_MINIMAX = "use_mtp num_mtp_modules mtp_transformer_layers auto_map"
# Tokens that other programs look for, and classes that were not kept.
_HUNYUAN = """
    eod_token_id eos_token_id_list pretraining_tp add_classification_head class_num use_rotary_pos_emb auto_map
    use_mixed_mlp_moe norm_type pool_type
"""
# Training, the class of the KV cache, and a mark of another library.
_LLAMA4 = _EXPERTS | {"cache_implementation", "for_llm_compressor"}
# The vision model, and the tokens that represent an image.
_LLAMA4_IMAGES = """
    vision_config boi_token_index eoi_token_index image_token_index boi_token_id eoi_token_id image_token_id
    tie_word_embeddings
"""

# Dropout, and the class of the KV cache.
_GEMMA = frozenset({"attention_dropout", "cache_implementation"})

# How the model was trained, and by which programs.
_BLOOM = """
    attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion offset_alibi pretraining_tp skip_bias_add
    skip_bias_add_qkv slow_but_exact hidden_dropout attention_dropout n_inner unk_token_id
"""
_MPT = """
    resid_pdrop emb_pdrop learned_pos_emb init_device logit_scale embedding_fraction norm_type verbose init_config
    auto_map tokenizer_name fc_type ffn_config
"""

# Dropout, and an epsilon that norms do not have.
_BIOGPT = "attention_probs_dropout_prob hidden_dropout_prob activation_dropout layerdrop layer_norm_eps"

# The vision tower, and the tokens that represent an image.
_GEMMA3 = """
    vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index boi_token_id eoi_token_id
    image_token_id cache_implementation
"""

# What stands beside the text decoder of a checkpoint with a vision model.
_OUTER = """
    architectures model_type dtype torch_dtype transformers_version text_config vision_config tie_word_embeddings
    image_token_id video_token_id image_token_index video_token_index vision_start_token_id vision_end_token_id
    vision_token_id vision_feature_layer vision_feature_select_strategy projector_hidden_act multimodal_projector_bias
    image_seq_length image_grid_pinpoints spatial_merge_size downsample_factor downsample_ratio adapter_layer_norm_eps
    alignment_intermediate_size scale_factor use_image_newline_parameter ignore_index pad_token_id
    _pad_token_id use_cache
"""
OUTER_KEYS = frozenset(_OUTER.split())
_BESIDE_IMAGES = """
    mistral3 llava llava_next internvl aya_vision cohere2_vision idefics3 smolvlm qwen2_vl qwen2_5_vl qwen3_vl
    qwen3_vl_moe
"""

# Keys of one family that have no effect on inference. Tensor-parallel pretraining only splits the same products. The
# maximum sequence length of the first Llama conversions repeats max_position_embeddings.
FAMILY_KEYS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "llama": frozenset(_LLAMA.split()),
        "mistral": frozenset({"attention_dropout"}),
        "qwen2": frozenset({"attention_dropout"}),
        "qwen3": frozenset({"attention_dropout"}),
        "mimo": _DROPOUT | {"auto_map"},
        "opt": frozenset({"dropout", "attention_dropout", "activation_dropout", "layerdrop", "init_std"}),
        "gpt2": frozenset(_GPT2.split()),
        "phi": _PHI,
        "phi3": _PHI,
        "gemma": _GEMMA,
        "gemma2": _GEMMA | {"hidden_act"},
        "gemma3_text": _GEMMA | {"hidden_act"},
        "gemma3": frozenset(_GEMMA3.split()),
        **dict.fromkeys(("olmo", "olmo2", "olmo3", "granite", "glm", "glm4", "ministral", "helium"), _DROPOUT),
        "smollm3": _DROPOUT | _SMOLLM3,
        "seed_oss": _DROPOUT | {"residual_dropout", "pretraining_tp"},
        "arcee": _DROPOUT | {"pretraining_tp"},
        "ernie4_5": _DROPOUT,
        "gpt_neox": _DROPOUT | {"hidden_dropout", "classifier_dropout"},
        "exaone4": _DROPOUT | {"sliding_window_pattern", "cache_implementation"},
        "granitemoehybrid": _DROPOUT | frozenset(_GRANITE_HYBRID.split()),
        **dict.fromkeys(("mixtral", "olmoe", "granitemoe", "granitemoeshared", "glm4_moe"), _EXPERTS),
        "gpt_oss": _EXPERTS | _GPT_OSS,
        **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"), _DEEPSEEK),
        "llama4_text": _LLAMA4,
        "phimoe": _EXPERTS | {"auto_map", "input_jitter_noise"},
        "dots1": _DEEPSEEK,
        "ernie4_5_moe": _EXPERTS | {"moe_norm_min", "moe_use_aux_free", "moe_capacity", "num_nextn_predict_layers"},
        "minimax_m2": _EXPERTS | frozenset(_MINIMAX.split()),
        **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe"), _EXPERTS | frozenset(_HUNYUAN.split())),
        "ministral3": _DROPOUT,
        **dict.fromkeys(("nemotron", "apertus"), _DROPOUT | {"hidden_dropout"}),
        **dict.fromkeys(("internlm3", "iquestcoder", "cwm", "jais2"), _DROPOUT | {"pretraining_tp", "auto_map"}),
        "exaone": _DROPOUT | {"embed_dropout", "auto_map"},
        "vaultgemma": _GEMMA,
        "bloom": frozenset(_BLOOM.split()),
        "mpt": frozenset(_MPT.split()),
        **dict.fromkeys(_BESIDE_IMAGES.split(), OUTER_KEYS),
        "falcon": _DROPOUT | frozenset(_FALCON.split()),
        "gpt_bigcode": frozenset(f"{_GPT2} {_GPT_BIGCODE}".split()),
        "gpt_neo": _DROPOUT | frozenset(f"{_GPT2} embed_dropout resid_dropout classifier_dropout".split()),
        **dict.fromkeys(("gptj", "codegen"), frozenset(f"{_GPT2} rotary scale_attn_weights".split())),
        "llama4": frozenset(_LLAMA4_IMAGES.split()),
        "persimmon": _DROPOUT | {"hidden_dropout"},
        "dbrx": _EXPERTS | {"resid_pdrop", "emb_pdrop", "auto_map"},
        **dict.fromkeys(("bitnet", "nanochat", "hyperclovax", "granite_swa"), _DROPOUT | {"auto_map"}),
        "afmoe": _EXPERTS | {"auto_map", "load_balance_coeff", "use_grouped_mm"},
        "biogpt": frozenset(_BIOGPT.split()),
        "xglm": frozenset({"dropout", "attention_dropout", "activation_dropout", "layerdrop", "init_std"}),
        "openai-gpt": frozenset(_GPT2.split()),
        **dict.fromkeys(("granitemoe_swa", "solar_open", "hy_v3", "flex_olmo"), _EXPERTS | {"auto_map"}),
        "exaone_moe": _EXPERTS | {"sliding_window_pattern", "cache_implementation", "auto_map"},
        "youtu": _DROPOUT | {"auto_map", "embedding_initializer_range"},
        "minicpm3": _DROPOUT | {"auto_map", "pretraining_tp"},
        "mellum": _EXPERTS | {"num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types"},
        **dict.fromkeys(("qwen2_moe", "qwen3_moe"), _EXPERTS | {"max_window_layers"}),
        "stablelm": _DROPOUT | {"hidden_dropout"},
        "starcoder2": _DROPOUT | frozenset(_STARCODER2.split()),
        "cohere": _DROPOUT | {"model_max_length"},
        "cohere2": _DROPOUT | frozenset(_COHERE2.split()),
        "cohere_compass_text": _DROPOUT | {"pooling"},
    }
)

# Hugging Face allows null for these keys, meaning "derive it".
_NULLABLE = """
    num_key_value_heads head_dim factor word_embed_proj_dim n_inner hidden_activation position_embedding_type
"""
NULLABLE_KEYS = frozenset(_NULLABLE.split())
