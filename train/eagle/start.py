"""What an EAGLE-3 drafter begins with: the target's last layer, where it has the drafter's form.

Of random weights it takes most of a short training to become a layer at all. So the features begin as the hidden states
before the highest layer that is read, attention and MLP as the target's last ones, and the final norm as the target's;
what reads the next token's embedding, and the lower features, begin small and random.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.language_model import LanguageModel
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.drafters.eagle import EagleShape, init_eagle
from jaxinfer.models.drafters.heads import vocabulary_rows
from jaxinfer.models.layer_range import layer_params
from jaxinfer.models.layers import stored_kernel
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Params
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from train.eagle.rows import EagleRows
from train.eagle.unroll import read_features

# How large what begins at random is beside the target's own weights.
_RANDOM_SHARE = 0.3


def start(
    lm: LanguageModel, shape: EagleShape, ids: list[int] | None, shares: bool, key: jax.Array, batch: EagleRows | None
) -> tuple[Params, Params]:
    """Draw a drafter in float32 whose output matrix begins as the model's; return what is fixed and what is learned.

    All channels of the features get one size, by those of ``batch``; without it, no model runs.
    """
    learned = init_eagle(shape, None, key)
    fixed: Params = {} if ids is None else {"ids": jnp.asarray(ids, jnp.int32)}
    rows = jnp.arange(lm.config.vocab_size) if ids is None else fixed["ids"]
    output = vocabulary_rows(lm.config, lm.params, rows)
    if not shares:
        learned["output"] = {"kernel": output["kernel"].astype(jnp.float32)}
    elif ids is not None:
        fixed["output"] = output
    if batch is not None:
        learned["fc"]["kernel"] = evened(learned["fc"]["kernel"], lm, shape, batch)
    if is_alike(lm.config, shape.config):
        learned = as_last_layer(learned, lm, shape)
    return fixed, learned


def evened(kernel: Any, lm: LanguageModel, shape: EagleShape, batch: EagleRows) -> Any:
    """Return ``fc`` as if all channels of the features were of one size: some are a thousand times others."""
    model = Model(lm.programs.decoder, lm.params)
    read_BTF = np.asarray(read_features(shape, model, batch).read_BTF, np.float32)[batch.segments_BT > 0]
    return kernel / jnp.asarray(np.sqrt(np.mean(np.square(read_BTF), axis=0)) + 1e-6)


def is_alike(target: DecoderConfig, drafter: DecoderConfig) -> bool:
    """Tell whether a target's last layer computes what a drafter's does, but for what they read."""
    names = (
        *("model_dim", "num_heads", "num_kv_heads", "head_dim", "ffn_dim", "block", "norm", "activation", "gated_mlp"),
        *("qkv_bias", "output_bias", "mlp_bias", "qk_norm", "attention_scale", "attention_softcap", "attention_gate"),
        *("attention_sinks", "alibi", "scores_by_depth", "final_norm", "experts", "latent", "residual_scale"),
        *("clip_qkv", "inner_norms"),
    )
    last, own = target.layers[-1], drafter.layers[-1]
    # Not how frequencies are scaled, which a drafter learns; nor a window, which it has none of.
    turns_alike = last.rope is not None and replace(last.rope, scaling=None) == own.rope
    plain = not last.chunked and last.sharpening is None
    return turns_alike and plain and all(getattr(target, name) == getattr(drafter, name) for name in names)


def as_last_layer(learned: Params, lm: LanguageModel, shape: EagleShape) -> Params:
    """Return a new drafter with the weights of the target's last layer (`is_alike`)."""
    config, width = lm.config, lm.config.model_dim
    last = layer_params(config, lm.backend, lm.params["blocks"], config.num_layers - 1)

    def reading_both(name: str) -> Params:
        """Attention reads the embedding, to the left, and the features."""
        embedded = learned["attention"][name]["kernel"][:, :width]
        return {"kernel": jnp.concatenate([_RANDOM_SHARE * embedded, _widened(last["attention"][name])], axis=1)}

    attention = {name: reading_both(name) for name in ("query", "key", "value")}
    highest = jnp.eye(width, shape.fc_width, k=shape.fc_width - width)
    return {
        **learned,
        "fc": {"kernel": _RANDOM_SHARE * learned["fc"]["kernel"] + highest},
        "attention": {**attention, "output": {"kernel": _widened(last["attention"]["output"])}},
        "mlp": {name: {"kernel": _widened(last["mlp"][name])} for name in ("gate", "up", "down")},
        "mlp_norm": {"scale": _copied(last["mlp_norm"]["scale"])},
        "feature_norm": {"scale": _copied(last["attention_norm"]["scale"])},
        "final_norm": {"scale": _copied(lm.params["final_norm"]["scale"])},
    }


def _widened(linear: Params) -> Array:
    kernel = stored_kernel(linear)
    kernel = kernel.dequantize() if isinstance(kernel, QuantizedArray) else kernel
    return _copied(kernel)


def _copied(array: Array) -> Array:
    """Return a copy in float32: a step gives the memory of what it trains to its results."""
    return jnp.array(array, jnp.float32)
