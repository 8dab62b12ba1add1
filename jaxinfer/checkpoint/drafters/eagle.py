"""EAGLE drafters on disk, in the layouts of the EAGLE project, which SpecForge, SGLang and vLLM share.

A folder has ``config.json``, a Llama of one layer, and ``model.safetensors``. EAGLE-3: ``fc.weight``, ``midlayer.*``
(or ``layers.0.*``) with ``input_layernorm`` for embeddings and ``hidden_norm`` for features, ``norm.weight``,
``lm_head.weight`` with ``draft_vocab_size`` rows, ``d2t``, what to add to a row's number for its token id, and ``t2d``,
which tokens have a row. EAGLE-1 and 2: ``fc.weight``, ``fc.bias`` and ``layers.0.*`` without ``input_layernorm``.
Either may have ``embed_tokens.weight``; where that is the target's own table, it is not kept twice.

EAGLE-3.1 says ``fc_norm`` (``fc_norm.0.weight`` and so on, of each layer's features), ``norm_before_fc``
(``input_norm.weight``, of all of them) or ``norm_output``. In the format of vLLM's speculators the layer is described
under ``transformer_layer_config``, and the layers listed are those before which features are read. Names may begin
with ``model.``.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jaxinfer.checkpoint.drafters.shipped import check_fingerprint
from jaxinfer.checkpoint.hf_folder import open_hf_folder, refuse_pickle
from jaxinfer.checkpoint.new_folder import new_folder
from jaxinfer.checkpoint.safetensors_file import SafetensorsFile
from jaxinfer.errors import CheckpointNotFound, InvalidCheckpoint, UnsupportedModel
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.drafters.eagle import EagleShape, default_features
from jaxinfer.models.families.llama import translate
from jaxinfer.notation import Params
from jaxinfer.ops.backend import Backend

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# The EAGLE project's own files are pickled, and transformers knows no model for them.
_PICKLED = "pytorch_model.bin"
_MEND = "convert them by the line in jaxinfer/checkpoint/README.md"
_FINGERPRINT = "base_fingerprint"
_NESTED, _DESCRIBED = "eagle_config", "transformer_layer_config"
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# What a config says of the layer; the rest is of the target.
_LAYER_KEYS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act"),
    *("rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", "vocab_size"),
)
_ATTENTION = (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("output", "o_proj"))
_MLP = (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj"))


def read_eagle(
    folder: Path,
    config: DecoderConfig,
    backend: Backend,
    params: Mapping[str, Any],
    fingerprint: Callable[[], str | None] = lambda: None,
) -> tuple[EagleShape, Params]:
    """Read a drafter for a model of this config and these parameters, as `jaxinfer.models.drafters.eagle` has it.

    Raises :class:`CheckpointNotFound` for missing files, and :class:`InvalidCheckpoint` for files that are damaged,
    pickled, of an unknown form, or made for a model of another width, vocabulary or, where they name it, other weights.
    """
    if not folder.is_dir():
        raise CheckpointNotFound(f"{folder}: no such folder of an EAGLE drafter")
    if (folder / _PICKLED).is_file() and not (folder / WEIGHTS).is_file():
        raise refuse_pickle(folder / _PICKLED, _MEND)
    settings = open_hf_folder(folder).config
    described = settings.get(_DESCRIBED, {})
    if not isinstance(described, Mapping):
        raise InvalidCheckpoint(f"{folder / CONFIG}: {_DESCRIBED} must be an object")
    settings = {**described, **settings}
    tensors = SafetensorsFile(folder / WEIGHTS, ["I64", "I32"])
    stored = {name.removeprefix("model."): name for name in tensors.shapes()}
    if twice := sorted(name for name in stored if {name, f"model.{name}"} <= tensors.shapes().keys()):
        raise InvalidCheckpoint(f"{folder / WEIGHTS}: {twice[0]} and model.{twice[0]} are one tensor: keep one of them")
    shapes = {name: tensors.shapes()[full] for name, full in stored.items()}
    shape = _read_shape(folder, settings, shapes, config)
    check_fingerprint(folder, settings.get(_FINGERPRINT), fingerprint)
    names = _tensor_names(shape, "midlayer." if any(name.startswith("midlayer.") for name in shapes) else "layers.0.")
    dtype, rows = np.dtype(backend.param_dtype), config.vocab_size
    if shape.fuses:
        rows = _draft_rows(folder, settings, shapes, config)
    wanted = {path: (name, size) for path, (name, size) in names.items() if path != "fc.bias" or name in shapes}
    if "lm_head.weight" in shapes and shape.fuses:
        wanted["output.kernel"] = "lm_head.weight", (rows, shape.config.model_dim)
    if "embed_tokens.weight" in shapes:
        wanted["embedding"] = "embed_tokens.weight", (config.vocab_size, shape.config.model_dim)
    elif shape.config.model_dim != config.model_dim:
        raise InvalidCheckpoint(
            f"{folder}: the drafter is {shape.config.model_dim} wide, the model {config.model_dim}, and it has no "
            "embed_tokens.weight of its own"
        )
    _check_tensors(folder, wanted, shapes)
    found: Params = {}
    for path, (name, _) in wanted.items():
        node: Any = found
        *parents, last = path.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        # Copied, because the file may change while the model is in use.
        node[last] = jnp.array(tensors.read(stored[name], dtype))
    if shape.feature_norms:
        norms: Params = found["before_fc"]
        found["before_fc"] = tuple(norms[str(at)] for at in range(len(norms)))
    if "embedding" in found and _is_same(found["embedding"], params):
        del found["embedding"]
    if "d2t" in shapes and rows < config.vocab_size:
        found["ids"] = _read_ids(folder, tensors, stored["d2t"], rows, config.vocab_size)
    return shape, found


def write_eagle(
    folder: Path,
    shape: EagleShape,
    params: Params,
    vocab_size: int,
    num_layers: int,
    *,
    base: str | None = None,
    base_fingerprint: str | None = None,
    beside: Mapping[str, str] = MappingProxyType({}),
    overwrite: bool = False,
) -> None:
    """Write an EAGLE-3 drafter for a target of so many layers to a new folder, in the published layout.

    ``beside`` are further files, their texts by name. ``overwrite`` replaces a folder of a drafter.
    """
    config = shape.config
    (kind,) = config.kinds
    assert shape.fuses
    assert not shape.feature_norms
    assert not shape.norm_output
    assert kind.rope is not None
    assert kind.rope.scaling is None
    ids = np.asarray(params["ids"]) if "ids" in params else np.arange(vocab_size)
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.model_dim,
        "target_hidden_size": shape.target_dim,
        "intermediate_size": config.ffn_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": kind.rope.theta,
        "rope_scaling": None,
        "max_position_embeddings": config.max_position,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": vocab_size,
        "draft_vocab_size": len(ids),
        **({} if base is None else {"base": base}),
        **({} if base_fingerprint is None else {_FINGERPRINT: base_fingerprint}),
    }
    if shape.layers != default_features(num_layers):
        settings[_NESTED] = {_LAYER_IDS: [layer - 1 for layer in shape.layers]}
    tensors = {}
    for path, (name, _) in _tensor_names(shape, "midlayer.").items():
        node: Any = params
        for part in path.split("."):
            node = node.get(part) if node is not None else None
        if node is not None:
            tensors[name] = np.ascontiguousarray(node)
    if "output" in params:
        tensors["lm_head.weight"] = np.ascontiguousarray(params["output"]["kernel"])
    tensors["d2t"] = (ids - np.arange(len(ids))).astype(np.int64)
    tensors["t2d"] = np.isin(np.arange(vocab_size), ids)
    with new_folder(folder, CONFIG if overwrite else None) as new:
        (new / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
        save_file(tensors, new / WEIGHTS)
        for name, text in beside.items():
            (new / name).write_text(text, encoding="utf-8")


def _read_shape(
    folder: Path, settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], target: DecoderConfig
) -> EagleShape:
    path = folder / CONFIG
    fuses = any(name.endswith(".hidden_norm.weight") for name in shapes)
    if "fc.weight" not in shapes or (not fuses and "layers.0.mlp.up_proj.weight" not in shapes):
        raise InvalidCheckpoint(f"{folder}: no EAGLE drafter: it needs fc.weight and midlayer.* or layers.0.* tensors")
    if settings.get("num_hidden_layers", 1) != 1:
        raise InvalidCheckpoint(f"{path}: num_hidden_layers is {settings['num_hidden_layers']!r}; only 1 is known")
    try:
        config = translate({"num_hidden_layers": 1, **{key: settings[key] for key in _LAYER_KEYS if key in settings}})
    except UnsupportedModel as problem:
        raise InvalidCheckpoint(f"{path}: {problem}") from None
    if config.vocab_size != target.vocab_size:
        raise InvalidCheckpoint(
            f"{folder}: the drafter knows {config.vocab_size} tokens, but the model's vocabulary has "
            f"{target.vocab_size}"
        )

    def has(part: str) -> bool:
        return any(name.endswith(f".self_attn.{part}") for name in shapes)

    qk_norm = "head" if has("q_norm.weight") else None
    config = replace(config, qkv_bias=has("q_proj.bias"), output_bias=has("o_proj.bias"), qk_norm=qk_norm)
    target_dim = settings.get("target_hidden_size") or target.model_dim
    if target_dim != target.model_dim or (not fuses and config.model_dim != target.model_dim):
        width = target_dim if target_dim != target.model_dim else config.model_dim
        raise InvalidCheckpoint(f"{folder}: reads {width} hidden channels, but the model has {target.model_dim}")
    layers = _read_layers(path, settings, target.num_layers) if fuses else (target.num_layers,)
    flags = {name: _read_flag(path, settings, name) for name in _FLAGS}
    if flags["fc_norm"] and flags["norm_before_fc"]:
        raise InvalidCheckpoint(f"{path}: fc_norm and norm_before_fc are two norms of the same features: one is known")
    if flags["norm_output"] and not fuses:
        raise InvalidCheckpoint(f"{path}: norm_output is known of EAGLE-3 drafters, and this is an older one")
    norms = "each" if flags["fc_norm"] else "all" if flags["norm_before_fc"] else ""
    return EagleShape(config, layers, target_dim, fuses, flags["norm_before_residual"], norms, flags["norm_output"])


def _read_flag(path: Path, settings: Mapping[str, Any], name: str) -> bool:
    nested = settings.get(_NESTED)
    found = settings.get(name, nested.get(name) if isinstance(nested, Mapping) else None)
    if found is not None and type(found) is not bool:
        raise InvalidCheckpoint(f"{path}: {name} must be true or false, not {found!r}")
    return bool(found)


def _read_layers(path: Path, settings: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the layers before which features are read; files list those after which they are, one less, or these."""
    nested = settings.get(_NESTED)
    listed = settings.get(_LAYER_IDS, nested.get(_LAYER_IDS) if isinstance(nested, Mapping) else None)
    if listed is None:
        return default_features(num_layers)
    if _DESCRIBED in settings and isinstance(listed, list):
        listed = [layer - 1 if type(layer) is int else layer for layer in listed]
    is_list = isinstance(listed, list) and all(type(layer) is int and -1 <= layer < num_layers for layer in listed)
    if not is_list or not listed or sorted(set(listed)) != listed:
        raise InvalidCheckpoint(f"{path}: {_LAYER_IDS} must list layers below {num_layers} in ascending order")
    return tuple(layer + 1 for layer in listed)


def _draft_rows(
    folder: Path, settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], config: DecoderConfig
) -> int:
    rows = settings.get("draft_vocab_size") or config.vocab_size
    if type(rows) is not int or not 1 <= rows <= config.vocab_size:
        raise InvalidCheckpoint(f"{folder / CONFIG}: draft_vocab_size must be 1 to {config.vocab_size}, not {rows!r}")
    if rows < config.vocab_size and "d2t" not in shapes:
        raise InvalidCheckpoint(f"{folder / WEIGHTS}: a draft vocabulary of {rows} tokens needs tensor d2t")
    return rows


def _tensor_names(shape: EagleShape, layer: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the tensor of each parameter, and its shape."""
    config, width = shape.config, shape.config.model_dim
    inputs = 2 * width if shape.fuses else width
    heads = {"query": config.num_heads, "key": config.num_kv_heads, "value": config.num_kv_heads}
    names = {"fc.kernel": ("fc.weight", (width, shape.fc_width)), "fc.bias": ("fc.bias", (width,))}
    for ours, theirs in _ATTENTION:
        sizes = (
            (heads[ours] * config.head_dim, inputs) if ours in heads else (width, config.num_heads * config.head_dim)
        )
        names[f"attention.{ours}.kernel"] = f"{layer}self_attn.{theirs}.weight", sizes
        if config.qkv_bias if ours in heads else config.output_bias:
            names[f"attention.{ours}.bias"] = f"{layer}self_attn.{theirs}.bias", sizes[:1]
    if config.qk_norm is not None:
        for ours, theirs in (("query", "q_norm"), ("key", "k_norm")):
            names[f"attention.{ours}_norm.scale"] = f"{layer}self_attn.{theirs}.weight", (config.head_dim,)
    for ours, theirs in _MLP:
        sizes = (width, config.ffn_dim) if ours == "down" else (config.ffn_dim, width)
        names[f"mlp.{ours}.kernel"] = f"{layer}mlp.{theirs}.weight", sizes
    norms = {"mlp_norm": f"{layer}post_attention_layernorm"}
    if shape.fuses:
        norms |= {"embedding_norm": f"{layer}input_layernorm", "feature_norm": f"{layer}hidden_norm"}
        norms["final_norm"] = "norm"
    names |= {f"{ours}.scale": (f"{theirs}.weight", (width,)) for ours, theirs in norms.items()}
    for at, channels in enumerate(shape.feature_norm_widths):
        theirs = f"fc_norm.{at}" if shape.feature_norms == "each" else "input_norm"
        names[f"before_fc.{at}.scale"] = f"{theirs}.weight", (channels,)
    return names


def _check_tensors(
    folder: Path, wanted: Mapping[str, tuple[str, tuple[int, ...]]], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    path = folder / WEIGHTS
    for name, size in wanted.values():
        if name not in shapes:
            raise InvalidCheckpoint(f"{path}: an EAGLE drafter needs tensor {name}, which is missing")
        if shapes[name] != size:
            raise InvalidCheckpoint(
                f"{path}: tensor {name} has shape {list(shapes[name])}, but the model needs {list(size)}"
            )
    placed = {name for name, _ in wanted.values()} | {"d2t", "t2d", "lm_head.weight"}
    if extra := sorted(name for name in shapes if name not in placed and not name.endswith("rotary_emb.inv_freq")):
        raise InvalidCheckpoint(f"{path}: an EAGLE drafter leaves no place for tensor {extra[0]}")


def _read_ids(folder: Path, tensors: SafetensorsFile, name: str, rows: int, vocab_size: int) -> jax.Array:
    path = folder / WEIGHTS
    if tensors.shapes()[name] != (rows,):
        raise InvalidCheckpoint(f"{path}: tensor d2t has shape {list(tensors.shapes()[name])}, not [{rows}]")
    ids = np.arange(rows) + tensors.read(name, np.dtype(np.int64))
    if ids.min() < 0 or ids.max() >= vocab_size or len(np.unique(ids)) < rows:
        raise InvalidCheckpoint(f"{path}: tensor d2t does not lead to {rows} tokens of {vocab_size}")
    return jnp.asarray(ids, jnp.int32)


def _is_same(table: jax.Array, params: Mapping[str, Any]) -> bool:
    own = params["embed"]["embedding"]
    return isinstance(own, jax.Array) and own.shape == table.shape and bool(jnp.all(own.astype(table.dtype) == table))
