"""Loads a language model from a checkpoint."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from jax.sharding import Mesh

from jaxinfer.cache.layouts import CacheLayout, parse_layout
from jaxinfer.checkpoint.few_bits import parse_few_bits
from jaxinfer.checkpoint.first_layers import first_layers
from jaxinfer.checkpoint.open import open_checkpoint
from jaxinfer.errors import InvalidOption, InvalidTokenizer, shown
from jaxinfer.language_model import LanguageModel
from jaxinfer.model_checks import check_max_len, check_mesh, read_tokenizer
from jaxinfer.model_params import check_few_bits, check_form, check_kernels, read_params
from jaxinfer.model_sparsity import check_sparsity
from jaxinfer.models.cache_rows import cached_width
from jaxinfer.models.families.registry import family_of
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.sparsity import parse_sparsity
from jaxinfer.parallel.mesh import MeshConfig
from jaxinfer.parallel.partitioner import partitioner_of
from jaxinfer.start_times import Clock, LoadTimes

DEFAULT_MODEL = "smollm2-135m-instruct"


def load(
    model: str | Path = DEFAULT_MODEL,
    *,
    dtype: str | None = None,
    layers: int | None = None,
    weights: str | None = None,
    activations: str | None = None,
    sparsity: str | None = None,
    exact: str | None = None,
    max_len: int | None = None,
    cache: str | CacheLayout = "dense",
    cache_dtype: str | None = None,
    mesh: MeshConfig | Mesh | str | None = None,
    collectives: str | None = None,
    scan_layers: bool | None = None,
    revision: str | None = None,
    token: str | None = None,
    kept: str | Path | None = None,
    notice: Callable[[str], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LanguageModel:
    """Load a model from a hub id or a path: a folder (Hugging Face's or ``convert``'s), a .gguf or a llama2.c .bin.

    ``dtype`` is float32, bfloat16, float16 or float64 (default: float32 on a CPU, else bfloat16). ``layers`` are how
    many of the first layers to read and to run, with the final norm and the output matrix (default: all): an early exit
    of a model that was trained for it, as by LayerSkip. ``weights`` are rounded to ``"int8"``, ``"int4:group=64"``,
    ..., or a GGUF file's own, ``"gguf"`` (``jaxinfer/ops/few_bits``): faster, and except for ``"gguf"`` another text.
    ``activations="int8"`` rounds what int8 and int4 weights multiply to bytes too: faster again, another text again.
    ``sparsity`` leaves out features of feed-forward layers: ``"exact"`` those that ReLU makes zero, in the same bits on
    a CPU, in blocks of 128 on a TPU;
    ``"threshold:0.01"`` or ``"topk:512"`` more of them, another text (``jaxinfer/ops/cpu_kernels/active``).
    ``exact`` is what strategies share with plain decoding: ``"bits"``, or the tokens up to rounding, ``"margin"``
    (default: bits on a CPU, else margin; ``jaxinfer/sampling/README.md``).
    ``max_len`` bounds prompt and output together, in tokens (default: the model's context). ``cache`` is ``dense``,
    ``paged:page=64``, ``streaming:sinks=4,window=W`` for texts without end, of which the first and the last W tokens
    are kept: another text, or ``retrieval:budget=256,chunk=16,recent=64``, where each token reads the 16 chunks of 16
    tokens that suit it best and the last 64: another text too. With ``crop:keep=512`` a text
    outgrows learned positions (GPT-2, OPT): its last 512 tokens are then prefilled again. ``cache_dtype`` keeps keys
    and values in 8 bits, ``int8`` or ``fp8``; another text too. By default, they have 16 if the weights have, else 32.
    ``mesh`` splits the model over all devices, as in ``MeshConfig(tensor=4)`` or ``"tensor=4"``, or over those of a
    mesh of JAX with the same axes; with ``collectives="int8"`` they exchange sums in bytes: another text.
    ``scan_layers`` overrides how the blocks run. ``kept`` is a folder for converted weights and compiled programs,
    which later processes then find: code, so that the folder has to be the user's alone. ``notice`` receives lines for
    the user, ``progress`` bytes done and in all. Raises subclasses of `jaxinfer.errors.JaxinferError`.
    """
    for name, value in (("model", model), ("revision", revision or ""), ("token", token or ""), ("kept", kept or "")):
        if not isinstance(value, str | Path):
            raise InvalidOption(f"{name} {shown(value)} is no text and no path")
    backend = choose_backend(
        dtype,
        scan_layers=scan_layers,
        exact=exact,
        cache_dtype=cache_dtype,
        collectives=collectives,
        activations=activations,
    )
    backend = replace(backend, sparsity=parse_sparsity(sparsity))
    layout, partitioner, few_bits = parse_layout(cache), partitioner_of(mesh), parse_few_bits(weights)
    times, clock = LoadTimes(), Clock()
    checkpoint = open_checkpoint(model, revision=revision, token=token, notice=notice, progress=progress)
    checkpoint = first_layers(checkpoint, layers)
    family = family_of(checkpoint.config)
    config = family.translate(checkpoint.config)
    check_max_len(config, max_len, layout)
    check_mesh(layout, partitioner)
    cached_width(config, backend)
    check_few_bits(few_bits, backend)
    check_form(few_bits, activations, config)
    partitioner.check(config)
    check_sparsity(config, backend, partitioner.mesh, few_bits)
    times.open_seconds = clock.lap()
    tokenizer = None
    with suppress(InvalidTokenizer):  # token ids need none; the first text says what is wrong with it
        tokenizer = read_tokenizer(checkpoint, config)
    times.tokenizer_seconds = clock.lap()

    names = family.tensor_names(config)
    params = read_params(checkpoint, names, config, backend, partitioner, few_bits, kept, times, notice, progress)
    check_kernels(params, activations)
    times.weights_seconds = clock.lap()
    return LanguageModel(
        config,
        params,
        backend,
        checkpoint,
        tokenizer=tokenizer,
        max_len=max_len,
        cache=layout,
        mesh=partitioner.mesh,
        kept=kept,
        load_times=times,
        is_rounded=few_bits is not None and few_bits.form is not None,
    )
