"""Quantizes a loaded model on calibration texts."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import getitem
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoint.few_bits import parse_few_bits
from jaxinfer.checkpoint.kept_params import params_of, write_params
from jaxinfer.errors import InvalidOption, shown
from jaxinfer.kept.conditions import compiler_conditions
from jaxinfer.kept.folder import KeptFolder, NotKept
from jaxinfer.kept.spelling import digest, spell
from jaxinfer.language_model import LanguageModel
from jaxinfer.model_checks import check_ids, check_whole
from jaxinfer.model_params import check_few_bits, check_form, check_kernels
from jaxinfer.models.decoder import Decoder, abstract_params
from jaxinfer.models.few_bits import change_matrices, in_few_bits, is_table
from jaxinfer.models.folded import Folded
from jaxinfer.models.layers import EXPERTS, KERNEL, TRANSPOSED_KERNEL, locate, stored_kernel
from jaxinfer.models.stacking import stack_params
from jaxinfer.notation import Int, Params
from jaxinfer.ops.backend import Backend, check_activations
from jaxinfer.ops.few_bits.formats import Format
from jaxinfer.ops.few_bits.quantized_array import is_quantized
from jaxinfer.ops.few_bits.round_to_nearest import (
    TOO_LARGE,
    are_finite,
    fits_scales,
    has_finite_scales,
    round_to_nearest,
)
from jaxinfer.quantization.calibration import quantize_layers
from jaxinfer.quantization.experts import LEAST_TOKENS
from jaxinfer.quantization.methods import METHODS, SPARSE, SmoothQuant
from jaxinfer.sampling.params import SamplingParams

# The texts that a model writes to be calibrated on, and the tokens of each.
NUM_TEXTS, TEXT_TOKENS = 128, 512
# The texts that it writes at a time.
TEXTS_TOGETHER = 16
# Sparse weights by their size alone.
MAGNITUDE = "magnitude"
# Of layers that are kept until all are done.
_MAX_KEPT_BYTES = 1 << 40


def quantize(
    model: LanguageModel,
    weights: str,
    *,
    method: str = "gptq",
    activations: str | None = None,
    calibration: Sequence[int] | None = None,
    num_texts: int = NUM_TEXTS,
    text_tokens: int = TEXT_TOKENS,
    kept: str | Path | None = None,
    advance: Callable[[int], None] = lambda layer: None,
    wrote: Callable[[int], None] = lambda count: None,
    notice: Callable[[str], None] | None = None,
) -> LanguageModel:
    """Return a model whose weights are in few bits or sparse, as ``load(weights=...)`` does, but chosen by a method.

    ``weights`` is ``int8`` or ``int4:group=64``. ``method`` is ``"gptq"`` (2210.17323), ``"awq"`` (2306.00978) or
    ``"awq+gptq"``, scales by the one and codes by the other; or ``"smoothquant"`` (2211.10438), made for
    ``activations="int8"``, with which the model then runs; ``load`` rounds each weight to the nearest. Sparse weights,
    ``2:4`` or ``blocks:kept=1/2``, are chosen by ``"sparsegpt"`` (2301.00774), or by ``"magnitude"``, which reads no
    text and keeps the largest, as ``load`` does.
    ``calibration`` are token ids of a text, of which up to ``num_texts`` pieces of ``text_tokens`` tokens are taken;
    without it the model writes texts itself, at temperature 1. ``kept`` is a folder for what is done, so that the same
    call of the same model after an interruption goes on there; what was made of anything else is made anew.
    ``advance`` receives each layer that is done, ``wrote`` how many texts the model has written, after every
    `TEXTS_TOGETHER`. Each of a mixture's experts is calibrated on the tokens that go to it; ``notice`` receives a line
    that says of how many there were too few, so that their weights were rounded to the nearest, and why something was
    not kept. Raises InvalidOption where ``load(weights=...)`` would, and for too short a text.
    """
    form, config = check_quantizable(model, weights, method), model.config
    check_activations(activations)
    check_form(parse_few_bits(weights), activations)
    for name, value, least in (("num_texts", num_texts, 1), ("text_tokens", text_tokens, 2)):
        check_whole(name, value)
        if value < least:
            raise InvalidOption(f"{name}={value} must be at least {least}")
    backend = replace(model.backend, scan_layers=False)
    params = stack_params(model.params, abstract_params(config, backend))
    if form.kept is None:
        form.of_tables.check_width(f"weights {weights!r}: embedding", config.embedding_dim or config.model_dim)
    for path, kernel in _kernels(params["blocks"]):
        form.check_width(f"weights {weights!r}: {'.'.join(path)}", kernel.shape[-1])
    _check_numbers(model.params, form, f"weights {weights!r}")
    if method == MAGNITUDE:
        if calibration is not None or kept is not None:
            raise InvalidOption("magnitude reads no text: leave out calibration and kept, or use sparsegpt")
        return model.changed(in_few_bits(model.params, form, f"weights {weights!r}"), is_rounded=True)
    length = min(text_tokens, model.max_len)
    done = _Kept.of(kept, lambda: _identity(model, params, backend), notice)
    if calibration is None:
        texts = _own_texts(model, num_texts, length, done.made_also_of({"texts": f"{num_texts} of {length}"}), wrote)
    else:
        texts = _cut(model, calibration, num_texts, length)
    layers = done.made_also_of({"weights": f"{weights} by {method}", "texts": digest(texts.tobytes().hex())})
    few: list[int] = []
    decoder, chosen = Decoder(config, backend), METHODS[method](form)
    blocks = list(quantize_layers(decoder, params, texts, chosen, layers, advance, few.append))
    if notice is not None and config.experts is not None:
        count = config.experts.num_experts * sum(config.sparse_layers)
        notice(
            f"{sum(few)} of {count} experts had fewer than {LEAST_TOKENS} of the calibration text's tokens: their "
            "weights were rounded to the nearest"
        )
    for layer, block in enumerate(blocks):
        # AWQ and SmoothQuant make some weights larger.
        matrices = filter(is_quantized, jax.tree.leaves(block, is_leaf=is_quantized))
        if not all(map(has_finite_scales, matrices)):
            raise InvalidOption(f"weights {weights!r}: layer {layer} has scaled weights that are {TOO_LARGE}")
    backend = replace(model.backend, activations=activations)
    arranged = _arranged(model.params, blocks, None if form.kept is not None else form.of_tables)
    return model.changed(arranged, backend=backend, is_rounded=True, folded=Folded.of(blocks))


def with_activations(model: LanguageModel, activations: str | None) -> LanguageModel:
    """Return the same model with what its weights multiply in bytes, or as wide as computed; it shares parameters."""
    check_activations(activations)
    check_kernels(model.params, activations)
    return model.changed(model.params, backend=replace(model.backend, activations=activations), is_rounded=True)


def check_quantizable(model: LanguageModel, weights: str, method: str, source: str = "the model") -> Format:
    """Return the form that ``weights`` names; raise InvalidOption if a method cannot choose codes of it for a model.

    ``source`` is what the user calls the model.
    """
    if method not in (*METHODS, MAGNITUDE):
        known = ", ".join((*METHODS, MAGNITUDE))
        raise InvalidOption(
            f"unknown method {shown(method)}; use {known}, or load(weights=...) to round to the nearest"
        )
    form = form_of(weights, method)
    check_few_bits(parse_few_bits(weights), model.backend)
    if model.programs.partitioner.mesh is not None:
        raise InvalidOption(f"weights {weights!r}: a method runs on one device: load the model without a mesh")
    if model.config.experts is not None and METHODS.get(method) is SmoothQuant:
        why = "smoothquant is for rows in int8, and experts multiply rows as they are: use gptq or awq"
        raise InvalidOption(f"weights {weights!r}: {why}")
    if model.config.latent is not None and method != MAGNITUDE:
        raise InvalidOption(f"weights {weights!r}: no method knows latent attention: round by load(weights=...)")
    if model.backend.sparsity is not None:
        asked = model.backend.sparsity.name
        raise InvalidOption(f"sparsity {asked!r} does not go with weights in few bits: load the model without it")
    if any(map(is_quantized, jax.tree.leaves(model.params, is_leaf=is_quantized))):
        raise InvalidOption(f"{source}: its weights are in few bits already: quantize the original")
    return form


def form_of(weights: str, method: str) -> Format:
    """Return the form that a method chooses codes for; raise InvalidOption for one that it cannot."""
    few_bits = parse_few_bits(weights)
    form = None if few_bits is None else few_bits.form
    is_sparse = form is not None and form.kept is not None
    is_known = is_sparse or (few_bits is not None and few_bits.name.partition(":")[0] in ("int8", "int4"))
    if few_bits is None or form is None or not is_known:
        raise InvalidOption(f"weights {shown(weights)}: a method needs int8 or int4:group=64, or 2:4")
    if is_sparse != (method in (*SPARSE, MAGNITUDE)):
        use = "sparsegpt or magnitude" if is_sparse else "gptq or awq, or sparse weights, such as 2:4"
        raise InvalidOption(f"weights {weights!r}: {method} does not choose these: use {use}")
    if few_bits.only_experts:
        raise InvalidOption(f"weights {weights!r}: a method chooses codes of all kernels: leave only= out")
    return form


def _own_texts(
    model: LanguageModel, num_texts: int, length: int, kept: "_Kept", wrote: Callable[[int], None]
) -> Int[np.ndarray, "N T"]:
    """Return texts that the model writes, some at a time, of which ``kept`` has those that are done."""
    texts = []
    for first in range(0, num_texts, TEXTS_TOGETHER):
        seeds = range(first, min(first + TEXTS_TOGETHER, num_texts))
        texts.append(kept.get(f"texts_{first}", functools.partial(_write_texts, model, seeds, length)))
        wrote(seeds.stop)
    return np.concatenate(texts)


def _write_texts(model: LanguageModel, seeds: range, length: int) -> Int[np.ndarray, "N T"]:
    """Return a text for each seed; each has all tokens, whatever ends it."""
    begin = model.config.bos_token_id
    prompt = [0 if begin is None else begin]
    sampling = [SamplingParams(temperature=1.0, seed=seed, ignore_eos=True) for seed in seeds]
    # In one batch: which texts run together then depends on nothing but their seeds, an interruption least of all.
    written = model.generate(
        [prompt] * len(seeds), max_new_tokens=length - 1, sampling=sampling, batch_size=TEXTS_TOGETHER
    )
    return np.array([[*prompt, *result.tokens] for result in written], np.int32)


def _cut(model: LanguageModel, calibration: Sequence[int], num_texts: int, length: int) -> Int[np.ndarray, "N T"]:
    """Return pieces of a text, evenly over all of it."""
    ids = check_ids(calibration, model.config.vocab_size)
    count = min(num_texts, len(ids) // length)
    if not count:
        raise InvalidOption(f"the calibration text has {len(ids)} tokens, but a piece has {length}: give a longer text")
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    return np.array([ids[start : start + length] for start in starts], np.int32)


def _check_numbers(params: Params, form: Format, named: str) -> None:
    """Raise InvalidOption, which begins with ``named``, for parameters that are not finite, or too large for a form."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not are_finite(leaf):
            where = ".".join(key.key for key in path)
            raise InvalidOption(f"{named}: {where} of the model has weights that are no finite numbers")

    def check(path: tuple[str, ...], matrix: Any) -> Any:
        if not fits_scales(matrix, form.of_tables if is_table(path) else form):
            raise InvalidOption(f"{named}: {'.'.join(path)} of the model has weights that are {TOO_LARGE}")
        return matrix

    change_matrices(params, check)


def _kernels(node: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each kernel ``[out, in]`` of blocks, or stack of experts' kernels, and where it is."""
    for key, value in node.items():
        if not isinstance(value, Mapping):
            continue
        if key == EXPERTS:
            yield from (((*path, key, name), stack) for name, stack in value.items())
        elif any(name in value for name in (KERNEL, TRANSPOSED_KERNEL)):
            yield (*path, key), stored_kernel(value)
        else:
            yield from _kernels(value, (*path, key))


def _arranged(params: Params, blocks: Sequence[Params], of_tables: Format | None) -> Params:
    """Return parameters with quantized layers in their places, and tables and output matrix, maybe in a form."""

    def walk(node: Mapping[str, Any], path: tuple[str, ...]) -> Params:
        made: Params = {}
        for key, value in node.items():
            if isinstance(value, Mapping):
                made[key] = walk(value, (*path, key))
            elif path and path[0] == "blocks":
                layers, stacked, name, _ = locate((*path, key), value.shape)
                found = [functools.reduce(getitem, name.split("."), blocks[layer]) for layer in layers or ()]
                whole = jax.tree.map(lambda *parts: jnp.stack(parts), *found) if stacked else found[0]
                made[KERNEL if key.endswith(KERNEL) else key] = whole
            elif of_tables is not None and is_table((*path, key)):
                rows = stored_kernel(node) if path == ("head",) else value
                made[KERNEL if path == ("head",) else key] = round_to_nearest(rows, of_tables)
            else:
                made[key] = value
        return made

    return walk(params, ())


def _identity(model: LanguageModel, params: Params, backend: Backend) -> Mapping[str, str]:
    """Return all of a model that decides how its layers are quantized; raises NotKept if something has no spelling.

    Of parameters every byte: a fingerprint reads some rows, and is the same in float32 and bfloat16.
    """
    return {
        "parameters": digest(spell(params)),
        "configuration": digest(spell(model.config)),
        "dtypes and kernels": digest(spell(backend), spell(model.programs.layout)),
    }


@dataclass(frozen=True)
class _Kept:
    """What is done, in a folder, until it is made of other things; without a folder nothing is kept."""

    folder: KeptFolder | None = None
    made_of: Mapping[str, Any] = field(default_factory=dict)
    notice: Callable[[str], None] | None = None
    # What ``notice`` was told of.
    told: set[str] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        path: str | Path | None,
        identity: Callable[[], Mapping[str, str]],
        notice: Callable[[str], None] | None,
    ) -> "_Kept":
        """Return what is done in a folder with a model, of which ``identity`` says what it is."""
        if path is None:
            return cls()
        # The user asked for it, and to lose what took hours is worse than a full disk.
        folder = KeptFolder(Path(path), _MAX_KEPT_BYTES, left_free=0)
        try:
            return cls(folder, {**identity(), **compiler_conditions()}, notice)
        except NotKept as reason:
            cls(folder, {}, notice)._tell("nothing is kept", reason)
            return cls()

    def made_also_of(self, made_of: Mapping[str, str]) -> "_Kept":
        """Return what is done with the same model and with more."""
        return replace(self, made_of={**self.made_of, **made_of})

    def get(self, name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        """Return an array that is kept, or make it and keep it."""
        found = self._read(name)
        if found is None:
            found = {name: make()}
            self._write(name, found)
        return np.asarray(found[name])

    def read(self, layer: int) -> Params | None:
        """Return a layer that is done, None if it is not."""
        return self._read(f"layer_{layer}")

    def write(self, layer: int, block: Params) -> None:
        """Keep a layer that is done."""
        self._write(f"layer_{layer}", block)

    def _read(self, name: str) -> Params | None:
        try:
            # Not mapped, so that a file that is removed leaves its room to others at once.
            data = None if self.folder is None else self.folder.read(name)
            return None if data is None else params_of(data, self.made_of)
        except NotKept as reason:
            self._tell("begun anew", reason)
            return None

    def _write(self, name: str, params: Params) -> None:
        try:
            if self.folder is not None:
                write_params(self.folder, name, params, self.made_of)
        except NotKept as reason:
            # What cannot be kept is made again after an interruption.
            self._tell("not all is kept", reason)

    def _tell(self, what: str, reason: NotKept) -> None:
        """Tell a reason once: that of the next layer is the same."""
        if self.notice is not None and self.folder is not None and what not in self.told:
            self.told.add(what)
            self.notice(f"{self.folder.path}: {what}: {reason}")
