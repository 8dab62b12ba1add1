"""The configurations that OPT and GPT-2 were published with are read, and what they cannot mean is refused."""

import pytest

from jaxinfer.errors import UnsupportedModel
from jaxinfer.models.families.registry import decoder_config

OPT_125M = {
    "_name_or_path": "facebook/opt-125m", "_remove_final_layer_norm": False, "activation_dropout": 0.0,
    "activation_function": "relu", "architectures": ["OPTForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 2,
    "do_layer_norm_before": True, "dropout": 0.1, "eos_token_id": 2, "ffn_dim": 3072, "hidden_size": 768,
    "init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048, "model_type": "opt",
    "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1, "prefix": "</s>",
    "torch_dtype": "float16", "transformers_version": "4.21.0.dev0", "use_cache": True, "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}  # fmt: skip
OPT_350M = {
    **OPT_125M, "do_layer_norm_before": False, "ffn_dim": 4096, "hidden_size": 1024, "num_attention_heads": 16,
    "num_hidden_layers": 24, "word_embed_proj_dim": 512,
}  # fmt: skip
GALACTICA = {
    **OPT_125M, "activation_function": "gelu", "bos_token_id": 0, "enable_bias": False, "vocab_size": 50000,
    "layer_norm_elementwise_affine": False, "learned_embeddings": True, "scale_embeddings": False,
}  # fmt: skip
GPT2 = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
    "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
    "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
}  # fmt: skip
GPT2_MEDIUM = {
    **GPT2, "n_embd": 1024, "n_head": 16, "n_layer": 24, "n_special": 0, "predict_special_tokens": True,
}  # fmt: skip
GPT2_XL = {**GPT2, "n_embd": 1600, "n_head": 25, "n_layer": 48, "output_past": True}
DISTILGPT2 = {**GPT2, "_num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "n_layer": 6}


@pytest.mark.parametrize("config", [OPT_125M, OPT_350M, GALACTICA])
def test_published_configurations_of_opt_are_read(config):
    decoder = decoder_config(config)
    assert (decoder.model_dim, decoder.ffn_dim) == (config["hidden_size"], config["ffn_dim"])
    assert (decoder.head_dim, decoder.max_position, decoder.learned_positions) == (64, 2048, 2)
    assert decoder.tied_embeddings
    assert not decoder.gated_mlp
    is_350m = config is OPT_350M
    assert decoder.block == ("post_norm" if is_350m else "pre_norm")
    assert decoder.embedding_dim == (512 if is_350m else None)
    assert decoder.final_norm == (not is_350m)
    assert decoder.mlp_bias == decoder.qkv_bias == decoder.output_bias == (config is not GALACTICA)
    assert decoder.norm == ("plain_layer" if config is GALACTICA else "layer")


@pytest.mark.parametrize("config", [GPT2, GPT2_MEDIUM, GPT2_XL, DISTILGPT2])
def test_published_configurations_of_gpt2_are_read(config):
    decoder = decoder_config(config)
    assert (decoder.model_dim, decoder.ffn_dim) == (config["n_embd"], 4 * config["n_embd"])
    assert (decoder.num_layers, decoder.head_dim) == (config["n_layer"], 64)
    assert (decoder.max_position, decoder.learned_positions, decoder.norm_eps) == (1024, 0, 1e-5)
    assert (decoder.activation, decoder.tied_embeddings, decoder.eos_token_ids) == ("gelu_tanh", True, (50256,))
    assert decoder.attention_scale is None
    assert not decoder.scores_by_depth


def test_absent_keys_take_the_defaults_of_transformers():
    transformers = pytest.importorskip("transformers")
    for name, theirs in (("opt", transformers.OPTConfig()), ("gpt2", transformers.GPT2Config())):
        assert decoder_config({"model_type": name}) == decoder_config(theirs.to_dict())


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (OPT_125M, "num_attention_heads", 7), (OPT_125M, "activation_function", "tanh"),
        (OPT_125M, "scale_embeddings", True), (OPT_125M, "do_layer_norm_before", None),
        (OPT_125M, "word_embed_proj_dim", 0), (OPT_125M, "layer_norm_eps", 1e-6),
        (GPT2, "n_head", 7), (GPT2, "activation_function", "gelu_10"), (GPT2, "add_cross_attention", True),
        (GPT2, "n_inner", -1), (GPT2, "layer_norm_epsilon", 0), (GPT2, "scale_attn_weights", "yes"),
        (GPT2, "reorder_and_upcast_attn", 1), (GPT2, "dropout", 0.1),
    ],
)  # fmt: skip
def test_an_unimplemented_value_is_refused_by_name(config, key, value):
    with pytest.raises(UnsupportedModel, match=rf"{key} = .* is not supported"):
        decoder_config({**config, key: value})
