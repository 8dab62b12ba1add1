"""Heads that predict tokens after the next one: Medusa (Cai et al., 2401.10774) and Hydra (2402.05109).

Head k predicts the token at depth k + 1 of a draft tree, counted from the current token. Its input is the final hidden
state h of the token before the current one. Its parameters are ``{"blocks": [...], "output": {"kernel"}}``, applied as

    x = h;  x = x + SiLU(W x + b) for each block;  logits = U x

A block with ``"out"`` is an MLP, ``x + O SiLU(W x + b)``. A *conditioned* head also reads the tokens drafted before its
own: instead of x, its first block reads h and the embeddings of the k + 1 tokens on the path from the current token, in
that order. All heads together are ``{"heads": [...]}``. If heads have no ``"output"``, they share one ``"output"``
beside ``"heads"``, or else the model's. ``"ids"`` are the token ids of the output rows, if these are not the whole
vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.layers import stored_kernel
from jaxinfer.models.model import Model
from jaxinfer.notation import DATA, TENSOR, Array, Float, Int, Params
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.ops.matmul import linear, product
from jaxinfer.ops.top_k import top_k


def is_conditioned(head_params: Params) -> bool:
    """Tell whether heads read the tokens drafted before theirs."""
    blocks = head_params["heads"][0]["blocks"]
    return bool(blocks) and blocks[0]["kernel"].shape[1] > heads_width(head_params)


def heads_width(head_params: Params) -> int:
    """Return the width of the hidden states that the heads expect."""
    head = head_params["heads"][0]
    if not head["blocks"]:
        return head["output"]["kernel"].shape[1]
    block = head["blocks"][0]
    return block.get("out", block["kernel"]).shape[0]


def head_states(
    head: Params, hidden: Float[Array, "*rows D"], path: Float[Array, "*rows d_path"] | None, backend: Backend
) -> Float[Array, "*rows D"]:
    """Run a head's blocks on final hidden states; ``path`` is the concatenation of the drafted tokens' embeddings."""
    states = hidden
    for index, block in enumerate(head["blocks"]):
        inputs = states if index or path is None else jnp.concatenate([hidden, path], axis=-1)
        inner = jax.nn.silu(linear(inputs, block["kernel"], block["bias"], backend))
        states = states + (linear(inner, block["out"], None, backend) if "out" in block else inner)
    return states


def head_logits(
    model: Model, head_params: Params, index: int, states: Float[Array, "*rows D"]
) -> Float[Array, "*rows U"]:
    """Return a head's logits, over the draft vocabulary if there is one.

    With an output matrix of the heads, the model's soft-cap on logits is left out: it does not change their order.
    """
    output = head_params["heads"][index].get("output") or head_params.get("output")
    if output is None:
        return model.logits(states)
    logits = product(states, output["kernel"], model.decoder.backend, split=(TENSOR, None))
    return logits + output["bias"].astype(logits.dtype) if "bias" in output else logits


def plain_logits(model: Model, head_params: Params, hidden_BD: Float[Array, "B D"]) -> Float[Array, "B heads U"]:
    """Return the logits of all heads that read only the hidden state."""
    backend, heads = model.decoder.backend, head_params["heads"]
    states = [head_states(head, hidden_BD, None, backend) for head in heads]
    if "output" in heads[0]:
        return jnp.stack([head_logits(model, head_params, index, state) for index, state in enumerate(states)], axis=1)
    # One product reads the shared matrix once.
    return head_logits(model, head_params, 0, jnp.stack(states, axis=1))


def top_tokens(
    head_params: Params, logits: Float[Array, "B heads U"], count: int, backend: Backend
) -> Int[Array, "B heads count"]:
    """Return the ids of each head's most probable tokens, the best first."""
    _, rows = top_k(logits, count, backend, (DATA, None, TENSOR))
    return head_params["ids"][rows] if "ids" in head_params else rows


def top_chances(
    head_params: Params, logits: Float[Array, "B heads U"], count: int, backend: Backend, temperature: float
) -> tuple[Float[Array, "B heads count"], Int[Array, "B heads count"]]:
    """Return the log-probabilities and the ids of each head's most probable tokens, the best first."""
    best, rows = top_k(logits, count, backend, (DATA, None, TENSOR))
    best, wide = (each.astype(jnp.promote_types(each.dtype, jnp.float32)) / temperature for each in (best, logits))
    best -= jax.nn.logsumexp(wide, axis=-1, keepdims=True)
    return best, head_params["ids"][rows] if "ids" in head_params else rows


def vocabulary_rows(config: DecoderConfig, params: Mapping[str, Any], ids: Int[Array, " W"]) -> Params:
    """Return the model's output matrix for some tokens only, as an ``"output"`` of heads."""
    table = params["embed"]["embedding"] if config.tied_embeddings else params["head"]["kernel"]
    kernel = table.rows(ids).dequantize() if isinstance(table, QuantizedArray) else table[ids]
    if config.embedding_dim is not None:
        project = stored_kernel(params["project_out"])
        project = project.dequantize() if isinstance(project, QuantizedArray) else project
        kernel = jnp.matmul(kernel, project, precision=jax.lax.Precision.HIGHEST).astype(kernel.dtype)
    bias = {"bias": params["head_bias"]["bias"][ids]} if config.head_bias else {}
    return {"kernel": kernel, **bias}
