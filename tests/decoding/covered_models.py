"""Tiny models of families that differ in all that a strategy meets, and what is asked of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxinfer
from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.decoding.batch import Request, prompt_bucket
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.registry import family_of
from jaxinfer.notation import Params
from jaxinfer.ops.backend import choose_backend
from jaxinfer.sampling import History, margins, sampling_arrays
from tests.decoding.rows import LEAST_MARGIN, Row, request, run
from tests.toys import encode_bytes, random_params

# With few tokens, drafts of any kind hit and miss; so do a window of 16 and caps on scores, in texts of 50 tokens.
VOCAB_SIZE = 16
_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 0,
}
CONFIGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "gemma2": {
            "model_type": "gemma2",
            **_SIZES,
            "intermediate_size": 48,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 16,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 6.0,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        "opt": {"model_type": "opt", **_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
        "gpt2": {
            "model_type": "gpt2",
            "vocab_size": VOCAB_SIZE,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 256,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
    }
)
MODELS = tuple(CONFIGS)
# What only some tests meet: norms of heads, parts side by side, factors, norms of all heads as one.
_LLAMA_LIKE: Mapping[str, Any] = {**_SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
OTHER_CONFIGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "cohere": {"model_type": "cohere", **_LLAMA_LIKE, "use_qk_norm": True, "logit_scale": 0.3},
        "granite": {
            "model_type": "granite",
            **_LLAMA_LIKE,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 0.7,
        },
        "olmo2": {"model_type": "olmo2", **_LLAMA_LIKE},
        # The first of two layers is dense; a token's experts are of two of four groups.
        "glm4_moe": {
            "model_type": "glm4_moe",
            **_LLAMA_LIKE,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
        },
        # The first of two layers has the window; yarn from a length that texts exceed.
        "gpt_oss": {
            "model_type": "gpt_oss",
            **_LLAMA_LIKE,
            "head_dim": 8,
            "sliding_window": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "swiglu_limit": 1.5,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
        },
        # Latent attention, with compressed queries; the first of two layers is dense.
        "deepseek_v3": {
            "model_type": "deepseek_v3",
            **_SIZES,
            "intermediate_size": 48,
            "kv_lora_rank": 16,
            "q_lora_rank": 20,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 12,
            "v_head_dim": 10,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
        },
        "qwen2_moe": {
            "model_type": "qwen2_moe",
            **_LLAMA_LIKE,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
        # Every row is whole groups of 32.
        "qwen3_moe": {
            "model_type": "qwen3_moe",
            **_LLAMA_LIKE,
            "head_dim": 8,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    }
)

LENGTHS = (44, 3, 37, 20, 50)  # of the prompts; one after another, the rows in `ALONE` have one shape
LIMITS = (36, 30, 33, 36, 35)  # of the outputs
ALONE = (0, 2, 4)
FABLES = ("The quick", "O", "A small otter watched the", "One grey heron f", "The old badger")
LONG_LIMITS = (200, 40, 40, 60, 40)

SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=1.3, seed=31),
    SamplingParams(temperature=0.7, top_k=6, top_p=0.95, seed=32),
    SamplingParams(logit_bias={5: 1.0, 7: 1.5}, repetition_penalty=1.1, presence_penalty=0.4, frequency_penalty=0.3),
    SamplingParams(
        temperature=1.3, top_k=8, repetition_penalty=1.1, frequency_penalty=0.2, min_new_tokens=6, seed=2**62 + 7
    ),
)
OTHER_SAMPLINGS = (
    SamplingParams(temperature=0.7, seed=41),
    SamplingParams(),
    SamplingParams(temperature=1.3, top_k=5, min_p=0.02, presence_penalty=0.5, seed=42),
    SamplingParams(temperature=1.3, top_p=0.9, repetition_penalty=1.2, min_new_tokens=6, seed=43),
    SamplingParams(frequency_penalty=0.5),
)


@dataclass(frozen=True)
class Asked:
    """A batch of requests, the tokens that end its rows, and what plain decoding makes of it."""

    requests: tuple[Request, ...]
    eos_token_ids: tuple[int, ...]
    oracle: tuple[Row, ...]

    @property
    def texts(self) -> list[list[int]]:
        """Prompt and output of every row."""
        return [[*one.prompt, *row.tokens] for one, row in zip(self.requests, self.oracle)]


@dataclass(frozen=True)
class Covered:
    """A model, and what is asked of it: with every way of sampling to the limit, and with others up to early stops."""

    lm: LanguageModel
    whole: Asked
    stopped: Asked


def cover_trained(folder: Path) -> Covered:
    """Ask a llama that was trained on fables for more of them."""
    return cover(jaxinfer.load(folder), [encode_bytes(text) for text in FABLES], LONG_LIMITS)


def cover_random(name: str, dtype: str = "float32", cache_dtype: str | None = None) -> Covered:
    """Ask a random model of a family."""
    return cover(random_model(name, dtype=dtype, cache_dtype=cache_dtype), random_prompts(), LIMITS)


def random_prompts() -> list[list[int]]:
    """Return prompts of tokens that are all equally likely."""
    rng = np.random.default_rng(5)
    return [rng.integers(1, VOCAB_SIZE, length).tolist() for length in LENGTHS]


def random_model(
    name: str, num_layers: int = 2, dtype: str = "float32", cache_dtype: str | None = None
) -> LanguageModel:
    """Return a random model whose last layer changes little, so that the layers before it are of one mind with it."""
    described = {**CONFIGS, **OTHER_CONFIGS}[name]
    config = replace(family_of(described).translate(described), num_layers=num_layers)
    params = random_params(config, seed=3)
    if config.block in ("sandwich", "output_norm"):
        # The norms behind its parts set how much a layer adds. The first is to outweigh the embedding and the last
        # layer, or every token repeats itself.
        first = params["blocks"]["layer_0"]
        first |= {norm: {"scale": 3 + first[norm]["scale"]} for norm in ("attention_post_norm", "mlp_post_norm")}
    else:
        params = damp_last_layer(config, params, 0.3)
    backend = choose_backend(dtype, "cpu", cache_dtype=cache_dtype)
    return LanguageModel(config, jax.tree.map(lambda leaf: leaf.astype(dtype), params), backend)


def damp_last_layer(config: DecoderConfig, params: Params, factor: float) -> Params:
    """Scale what the last of the unrolled layers adds to the residual stream, in a model without norms behind that."""
    name = f"layer_{config.num_layers - 1}"
    block = dict(params["blocks"][name])
    mlp = block["mlp"]

    def damped(linear: Params) -> Params:
        return {key: factor * value for key, value in linear.items()}

    block["attention"] = {**block["attention"], "output": damped(block["attention"]["output"])}
    if "experts" in mlp:
        stacks = [name for name in ("experts", "expert_biases") if name in mlp]
        mlp = mlp | {name: {**mlp[name], "down": factor * mlp[name]["down"]} for name in stacks}
    shared = {"shared": {**mlp["shared"], "down": damped(mlp["shared"]["down"])}} if "shared" in mlp else {}
    block["mlp"] = {**mlp, **shared, **({"down": damped(mlp["down"])} if "down" in mlp else {})}
    return {**params, "blocks": {**params["blocks"], name: block}}


def cover(lm: LanguageModel, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> Covered:
    """Ask a model to continue prompts, to the end and, with other sampling, up to a token that ends rows early."""
    others = ask(lm, prompts, limits, OTHER_SAMPLINGS)
    stopped = ask_clearly(lm, prompts, limits, OTHER_SAMPLINGS, (early_end(others.oracle),))
    return Covered(lm, ask_clearly(lm, prompts, limits, SAMPLINGS), stopped)


def early_end(rows: Sequence[Row]) -> int:
    """Return the token that would end most rows on their way."""
    tokens = sorted({token for row in rows for token in row.tokens})

    def num_ended(token: int) -> int:
        return sum(token in row.tokens[8:-4] and token not in row.tokens[:8] for row in rows)

    return max(tokens, key=num_ended)


def ask(
    lm: LanguageModel,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    samplings: Sequence[SamplingParams],
    eos_token_ids: tuple[int, ...] = (),
) -> Asked:
    """Decode plainly, each row alone where company changes no bit."""
    requests = tuple(request(*one) for one in zip(prompts, limits, samplings, strict=True))
    together = [[one] for one in requests] if lm.programs.decoder.backend.cpu_kernels else [requests]
    rows = [row for some in together for row in run(lm, some, eos_token_ids=eos_token_ids)]
    return Asked(requests, eos_token_ids, tuple(rows))


def ask_clearly(
    lm: LanguageModel,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    samplings: Sequence[SamplingParams],
    eos_token_ids: tuple[int, ...] = (),
) -> Asked:
    """Decode plainly, and ask rows anew, after one token more, whose tokens were nearly others.

    Weights that were trained in this run are not the same bits on every machine, so that no prompt is clear on all.
    """
    asked = ask(lm, prompts, limits, samplings, eos_token_ids)
    is_clear_B = least_margins(lm, asked) > LEAST_MARGIN
    for _ in range(8):
        if is_clear_B.all():
            break
        prompts = [prompt if clear else [prompt[0], *prompt] for prompt, clear in zip(prompts, is_clear_B)]
        asked = ask(lm, prompts, limits, samplings, eos_token_ids)
        is_clear_B = least_margins(lm, asked) > LEAST_MARGIN
    return asked


def least_margins(lm: LanguageModel, asked: Asked) -> np.ndarray:
    """Return for each row the least change of logits that would have made one of its output tokens another."""
    rows, prompts = range(len(asked.requests)), [list(one.prompt) for one in asked.requests]
    width = prompt_bucket(max(one.max_length - len(one.prompt) for one in asked.requests))
    num_slots = prompt_bucket(max(map(len, prompts))) + width
    text_BS = np.zeros((len(rows), num_slots), np.int32)
    for row, text in enumerate(asked.texts):
        text_BS[row, : len(text)] = text
    lengths_B = np.array([len(prompt) for prompt in prompts], np.int32)
    # The output is a tree without branches below the prompt's last token; what pads it comes last.
    places_BM = lengths_B[:, None] - 1 + np.arange(width, dtype=np.int32)
    relation_BMM = np.broadcast_to(np.tril(np.ones((width, width), bool)), (len(rows), width, width))
    node_tokens_BM = np.take_along_axis(text_BS, places_BM, axis=1)
    history = History(*map(jnp.asarray, (text_BS, lengths_B, lengths_B, node_tokens_BM, relation_BMM)))
    logits_BMV = np.take_along_axis(np.asarray(lm.logits(text_BS.tolist())), places_BM[..., None], axis=1)
    arrays = sampling_arrays(
        [one.sampling for one in asked.requests],
        [one.sample for one in asked.requests],
        asked.eos_token_ids,
        lm.config.vocab_size,
    )
    margins_BM = np.asarray(_jitted_margins(jnp.asarray(logits_BMV), jnp.asarray(places_BM + 1), arrays, history))
    return np.array([margins_BM[row, : len(asked.oracle[row].tokens)].min() for row in rows])


_jitted_margins = jax.jit(margins)
