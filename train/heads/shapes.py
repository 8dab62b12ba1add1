"""Heads before training: they start as copies of the model's own prediction."""

import argparse
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.errors import InvalidOption
from jaxinfer.language_model import LanguageModel
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.drafters.heads import is_conditioned, vocabulary_rows
from jaxinfer.notation import Params
from train.heads.loss import frequent_tokens, target_rows


@dataclass(frozen=True)
class HeadShape:
    """The shape of heads; see `jaxinfer.models.drafters.heads`.

    ``conditioned`` heads read the drafted tokens before theirs (Hydra). ``inner`` is the width of the blocks' MLPs, 0
    for single layers. ``shared`` heads use the model's output matrix, others have their own. ``draft_ids`` are the
    token ids of the matrix's rows, None for all.
    """

    num_heads: int = 4
    num_blocks: int = 1
    conditioned: bool = False
    inner: int = 0
    shared: bool = True
    draft_ids: tuple[int, ...] | None = None

    def target_rows(self, vocab_size: int) -> np.ndarray:
        """Return each token's row in the heads' outputs, -1 for tokens without one."""
        return target_rows(vocab_size, self.draft_ids)


def read_shape(options: argparse.Namespace, lm: LanguageModel, tokens_P: np.ndarray) -> HeadShape:
    """Return the shape for the options; a draft vocabulary is the stop tokens and the most frequent of ``tokens_P``."""
    ids, size = None, options.draft_vocab
    if size is not None and size < lm.config.vocab_size:
        always = [one for one in lm.eos_token_ids if one < lm.config.vocab_size][:size]
        ids = tuple(frequent_tokens(tokens_P, lm.config.vocab_size, size, always))
    return HeadShape(options.heads, options.blocks, options.hydra, options.inner, options.share_lm_head, ids)


def shape_of(head_params: Params) -> HeadShape:
    """Return the shape of heads read from a folder."""
    head = head_params["heads"][0]
    blocks = head["blocks"]
    inner = blocks[0]["kernel"].shape[0] if blocks and "out" in blocks[0] else 0
    ids = tuple(np.asarray(head_params["ids"]).tolist()) if "ids" in head_params else None
    return HeadShape(
        len(head_params["heads"]), len(blocks), is_conditioned(head_params), inner, "output" not in head, ids
    )


def init_heads(shape: HeadShape, config: DecoderConfig, params: Params, key: jax.Array) -> Params:
    """Draw heads in float32: each adds zero to the hidden state, and an own output matrix copies the model's."""
    heads = []
    for index in range(shape.num_heads):
        keys = jax.random.split(jax.random.fold_in(key, index), shape.num_blocks)
        blocks = tuple(
            _init_block(shape, config.model_dim, index if shape.conditioned and layer == 0 else None, keys[layer])
            for layer in range(shape.num_blocks)
        )
        head: dict[str, Any] = {"blocks": blocks}
        if not shape.shared:
            if config.head_bias:
                raise InvalidOption(
                    "heads with their own output matrices have no bias, but this model does: add --share-lm-head"
                )
            head["output"] = {"kernel": _rows(shape, config, params)["kernel"].astype(jnp.float32)}
        heads.append(head)
    return {"heads": tuple(heads)}


def frozen_heads(shape: HeadShape, config: DecoderConfig, params: Params) -> Params:
    """Return the untrained part of heads: their tokens, and the rows of the model's output matrix that they share."""
    if shape.draft_ids is None:
        return {}
    ids = jnp.asarray(shape.draft_ids, jnp.int32)
    return {"ids": ids, **({"output": _rows(shape, config, params)} if shape.shared else {})}


def _rows(shape: HeadShape, config: DecoderConfig, params: Params) -> Params:
    ids = jnp.arange(config.vocab_size) if shape.draft_ids is None else jnp.asarray(shape.draft_ids)
    return vocabulary_rows(config, params, ids)


def _init_block(shape: HeadShape, width: int, conditioned_on: int | None, key: jax.Array) -> Params:
    inputs = width * (1 if conditioned_on is None else conditioned_on + 2)
    inner = shape.inner or width
    block = {"bias": jnp.zeros((inner,), jnp.float32)}
    if not shape.inner:
        return {"kernel": jnp.zeros((inner, inputs), jnp.float32), **block}
    kernel = jax.random.normal(key, (inner, inputs), jnp.float32) / math.sqrt(inputs)
    return {"kernel": kernel, **block, "out": jnp.zeros((width, inner), jnp.float32)}
