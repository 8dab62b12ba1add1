"""``python -m train.eagle``: trains an EAGLE-3 drafter for a frozen model (Li et al., 2503.01840).

The model's features are computed once and kept on disk, or anew in every step (``--online``). The drafter is trained on
its own outputs, as many steps ahead as it is to draft. It writes the folder ``OUT/drafter``, in the published layout,
which ``--strategy eagle:heads=OUT/drafter`` loads.
"""

import argparse
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoint.drafters.eagle import read_eagle
from jaxinfer.errors import InvalidOption
from jaxinfer.language_model import LanguageModel
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.drafters.eagle import EagleShape, shape_for
from jaxinfer.models.drafters.heads import vocabulary_rows
from jaxinfer.notation import Params
from train.arguments import (
    add_cache_argument,
    add_data_arguments,
    add_row_length_argument,
    add_run_arguments,
    add_step_arguments,
    add_weights_argument,
    cache_folder,
    check_batch,
    fit_settings,
    identity,
    load_base,
    prepare,
    read_data,
    refuse_changed,
)
from train.command import EXIT_INTERRUPTED, number, run_command
from train.eagle.evaluation import EagleEvaluation
from train.eagle.export import export_eagle
from train.eagle.loss import EagleLoss
from train.eagle.rows import RowSource
from train.eagle.start import start
from train.eagle.unroll import kept_layers
from train.features.hidden_states import HiddenStates, cache_hidden_states, no_states
from train.heads.loss import frequent_tokens, target_rows
from train.loop.estimate import estimate
from train.loop.fit import claim_folder, fit_and_draw
from train.loop.operations import forward_operations
from train.loop.placement import build_mesh, place_base, replicate
from train.loop.progress import step_progress
from train.loop.step import cast_floats
from train.texts.packing import Example
from train.texts.rows import split_texts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m train.eagle``."""
    whole, share = number(int, 1), number(float, 0, 1)
    add_run_arguments(parser)
    add_weights_argument(parser)
    data = add_data_arguments(parser)
    add_cache_argument(data)
    data.add_argument("--online", action="store_true", help="compute features in every step, and keep none on disk")
    drafter = parser.add_argument_group("drafter")
    drafter.add_argument(
        "--init", metavar="FOLDER", type=Path, help="go on with this EAGLE-3 drafter (default: a new one)"
    )
    drafter.add_argument(
        "--draft-vocab",
        metavar="N",
        type=whole,
        help="draft only the N most frequent tokens (default: all, or those of --init)",
    )
    drafter.add_argument("--share-lm-head", action="store_true", help="use the base model's output matrix")
    loss = parser.add_argument_group("loss")
    loss.add_argument(
        "--steps",
        metavar="N",
        type=number(int, 1, 16),
        default=5,
        help="steps on the drafter's own outputs, the first among them (default: %(default)s)",
    )
    loss.add_argument(
        "--decay", metavar="X", type=share, default=0.8, help="weight of step i in the loss: X^i (default: %(default)s)"
    )
    steps = add_step_arguments(parser, items="rows", batch_size=8)
    add_row_length_argument(steps)


class Task(NamedTuple):
    """Everything that a run needs before its first step; ``fixed`` is what of the drafter is not trained."""

    source: RowSource
    held_out: RowSource
    shape: EagleShape
    params: Params
    fixed: Params


def run(options: argparse.Namespace) -> int:
    """Train, draw the curves and write the drafter."""
    if options.online:
        refuse_changed(options, add_arguments, "features on disk, which --online keeps none of", ("cache",))
    if options.init is not None:
        refuse_changed(options, add_arguments, "a new drafter, not to --init", ("share_lm_head",))
    rows = check_batch(options)
    lm = load_base(options, weights=options.weights)
    examples = read_data(options, lm, options.row_length)
    mesh = build_mesh(options.mesh, lm.config, rows)
    shape, params = read_drafter(options, lm)
    trained, _ = split_texts(len(examples), options.held_out, options.seed)
    ids = draft_vocabulary(options, lm, [examples[at] for at in trained])
    told = {
        "base": lm.base_fingerprint,
        **identity(options),
        "init": None if params is None else digest(jax.tree.leaves(params)),
        "draft_ids": None if ids is None else digest([np.asarray(ids, np.int32)]),
    }
    lm.params = place_base(lm.params, lm.config, lm.backend, mesh)
    if not options.dry_run:
        claim_folder(options.out, told)
    states = read_states(options, lm, examples, kept_layers(shape, lm.config.num_layers))
    task = plan(options, lm, examples, states, shape, params, ids)
    frozen, drafted = {"params": lm.params, "drafter": replicate(task.fixed, mesh)}, task.fixed.get("ids")
    loss = EagleLoss(lm.programs.decoder, shape, options.steps, options.decay)
    ready = prepare(options, loss, task.params, task.source.count, lambda items, at: task.source.take(items), mesh)
    if options.dry_run:
        operations = count_operations(options, lm.config, task)
        print(*estimate(ready.step, ready.state, frozen, ready.batch_at(0), ready.num_steps, operations), sep="\n")
        return 0
    rows_V = target_rows(lm.config.vocab_size, None if drafted is None else np.asarray(drafted).tolist())
    evaluation = EagleEvaluation(lm.programs.decoder, shape, frozen, task.held_out, rows_V, options.steps)
    settings = fit_settings(options, ready.num_steps, told)
    title = f"EAGLE-3 drafter for {options.model}"
    result = fit_and_draw(title, ready.step, ready.state, frozen, ready.batch_at, settings, evaluation)
    if result.interrupted:
        return EXIT_INTERRUPTED
    accuracies = evaluation.accuracies(result.params)
    drafter = {**result.params, **({} if drafted is None else {"ids": drafted})}
    export_eagle(options, lm, told, shape, drafter, result, accuracies, task.source.num_predicted)
    return 0


def count_operations(options: argparse.Namespace, target: DecoderConfig, task: Task) -> float:
    """Return the floating-point operations of a step, whose loss is a loop, which compilers count once.

    What is learned is multiplied three times, forwards and for the gradients of inputs and weights; what is fixed,
    twice.
    """
    config, width = task.shape.config, task.shape.config.model_dim
    num_tokens = options.batch_size * options.row_length
    num_asked = task.source.num_predicted / task.source.count * options.batch_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    # Queries, keys and values read the embedding and the features.
    layer = width * (2 * (heads + 2 * kv_heads) + heads + 3 * config.ffn_dim) + 2 * options.row_length * heads
    rows = len(task.fixed["ids"]) if "ids" in task.fixed else target.vocab_size
    output = rows * width * (3 if "output" in task.params else 2)
    teacher = target.vocab_size * (target.embedding_dim or target.model_dim)
    of_tokens = 3 * (options.steps * layer + task.shape.fc_width * width)
    drafting = 2.0 * (num_tokens * of_tokens + num_asked * (options.steps * output + teacher))
    online = forward_operations(target, num_tokens, options.row_length, 0.0) if options.online else 0.0
    return drafting + online


def read_drafter(options: argparse.Namespace, lm: LanguageModel) -> tuple[EagleShape, Params | None]:
    """Return the shape of the drafter, and the parameters to begin with where it has been trained before."""
    if options.init is None:
        return shape_for(lm.config), None
    backend = replace(lm.backend, param_dtype="float32")
    shape, params = read_eagle(options.init, lm.config, backend, lm.params, lambda: lm.base_fingerprint)
    (kind,) = shape.config.kinds
    is_plain = kind.rope is not None and kind.rope.scaling is None and "bias" not in params["fc"]
    is_plain = is_plain and not shape.feature_norms and not shape.norm_output
    if not shape.fuses or shape.norm_before_residual or "embedding" in params or not is_plain:
        raise InvalidOption(f"--init {options.init}: is no plain EAGLE-3 drafter, which is all that is trained")
    if options.draft_vocab is not None and "output" in params:
        raise InvalidOption(f"--init {options.init}: has an output matrix for its own tokens; leave out --draft-vocab")
    return shape, params


def read_states(
    options: argparse.Namespace, lm: LanguageModel, examples: list[Example], layers: tuple[int, ...]
) -> HiddenStates | None:
    """Return the model's features of the texts, zeros for a dry run; None if each step computes them."""
    if options.online:
        return None
    if options.dry_run:
        return no_states(examples, len(layers) * lm.config.model_dim)
    with step_progress("features", len(examples)) as report:
        return cache_hidden_states(lm, examples, cache_folder(options), report, layers=layers)


def plan(
    options: argparse.Namespace,
    lm: LanguageModel,
    examples: list[Example],
    states: HiddenStates | None,
    shape: EagleShape,
    params: Params | None,
    ids: list[int] | None,
) -> Task:
    """Split the texts, pack them, and draw the drafter, whose draft vocabulary is ``ids`` if it is a new one."""
    trained, held_out = split_texts(len(examples), options.held_out, options.seed)
    source, held_out_source = (
        RowSource(examples, states, texts, options.row_length, options.seed) for texts in (trained, held_out)
    )
    for name, found in (("train on", source), ("judge by", held_out_source)):
        if not found.count:
            raise InvalidOption(f"no text has the three tokens that it takes to {name}: give longer ones")
    if params is not None:
        kept = params.get("ids") if options.draft_vocab is None else ids
        fixed: Params = {} if kept is None else {"ids": jnp.asarray(kept, jnp.int32)}
        learned = cast_floats({name: value for name, value in params.items() if name != "ids"}, "float32")
        if "ids" in fixed and "output" not in params:
            fixed["output"] = vocabulary_rows(lm.config, lm.params, fixed["ids"])
        return Task(source, held_out_source, shape, learned, fixed)
    batch = None if options.dry_run else source.take(np.arange(min(4, source.count)))
    fixed, learned = start(lm, shape, ids, options.share_lm_head, jax.random.key(options.seed), batch)
    return Task(source, held_out_source, shape, learned, fixed)


def draft_vocabulary(options: argparse.Namespace, lm: LanguageModel, examples: list[Example]) -> list[int] | None:
    """Return the tokens that the texts predict most often, ends of a text among them; None for all tokens.

    Ties, also among tokens that are never predicted, go to those that are more frequent in prompts.
    """
    if options.draft_vocab is None or options.draft_vocab >= lm.config.vocab_size:
        return None
    tokens = np.concatenate([np.asarray(example.tokens) for example in examples])
    predicted = np.concatenate([np.asarray(example.mask) for example in examples])
    always = [one for one in lm.eos_token_ids if one < lm.config.vocab_size][: options.draft_vocab]
    return frequent_tokens(tokens, lm.config.vocab_size, options.draft_vocab, always, predicted)


def digest(arrays: Sequence[Any]) -> str:
    """Return 12 hexadecimal digits of arrays' values."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:12]


if __name__ == "__main__":
    sys.exit(run_command("eagle", "Train an EAGLE-3 drafter for a frozen model.", add_arguments, run))
