"""``python -m train.medusa``: trains heads that draft for a frozen model (Medusa-1, 2401.10774; Hydra, 2402.05109).

The model's hidden states are computed once and kept on disk. Heads are then trained on these alone, so a CPU is enough.
It writes the folder ``OUT/heads``, which ``--strategy medusa:heads=OUT/heads`` loads. ``--joint`` trains the model with
its heads (Medusa-2) and so changes the model; see `train.heads.joint`.
"""

import argparse
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.language_model import LanguageModel
from jaxinfer.notation import Params
from train.arguments import (
    add_cache_argument,
    add_data_arguments,
    add_run_arguments,
    add_soft_targets_argument,
    add_step_arguments,
    add_weights_argument,
    build_schedule,
    cache_folder,
    check_batch,
    fit_settings,
    identity,
    load_base,
    read_data,
    refuse_changed,
)
from train.command import EXIT_INTERRUPTED, number, run_command
from train.features.hidden_states import HiddenStates, cache_hidden_states, first_state
from train.heads.evaluation import HeadEvaluation
from train.heads.export import export_heads
from train.heads.joint import JOINT_OPTIONS, add_joint_arguments, run_joint
from train.heads.loss import HeadLoss, Windows, WindowSource
from train.heads.shapes import HeadShape, frozen_heads, init_heads, read_shape
from train.loop.estimate import estimate
from train.loop.fit import FitSettings, claim_folder, fit_and_draw
from train.loop.placement import build_mesh, place_base, place_batch, place_learned
from train.loop.progress import step_progress
from train.loop.step import Schedule, StepSettings, TrainState, compile_step
from train.texts.packing import Example, Order, split_batch
from train.texts.rows import split_texts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m train.medusa``."""
    whole, share = number(int, 1), number(float, 0, 1)
    add_run_arguments(parser)
    add_weights_argument(parser)
    data = add_data_arguments(parser)
    add_cache_argument(data)
    heads = parser.add_argument_group("heads")
    heads.add_argument("--heads", metavar="K", type=whole, default=4, help="number of heads (default: %(default)s)")
    heads.add_argument(
        "--blocks", metavar="N", type=whole, default=1, help="residual blocks of each head (default: %(default)s)"
    )
    heads.add_argument("--hydra", action="store_true", help="heads also read the tokens drafted before theirs (Hydra)")
    heads.add_argument(
        "--inner",
        metavar="N",
        type=number(int, 0),
        default=0,
        help="make each block an MLP of this width (default: 0, one matrix)",
    )
    heads.add_argument("--share-lm-head", action="store_true", help="use the base model's output matrix for all heads")
    heads.add_argument(
        "--draft-vocab", metavar="N", type=whole, help="draft only the N most frequent tokens (default: all)"
    )
    heads.add_argument("--int8", action="store_true", help="write the heads' matrices in eight bits")
    loss = parser.add_argument_group("loss")
    loss.add_argument(
        "--decay", metavar="X", type=share, default=0.8, help="weight of head k in the loss: X^k (default: %(default)s)"
    )
    add_soft_targets_argument(loss)
    loss.add_argument(
        "--dropout",
        metavar="P",
        type=number(float, 0, 0.9),
        default=0.0,
        help="dropout of the heads' inputs (default: 0)",
    )
    add_joint_arguments(parser)
    steps = add_step_arguments(parser, items="windows or rows")
    steps.add_argument(
        "--window", metavar="T", type=whole, default=32, help="tokens of each window (default: %(default)s)"
    )


class Task(NamedTuple):
    """Everything that a run needs before its first step."""

    shape: HeadShape
    frozen: Params
    source: WindowSource
    held_out: HiddenStates
    settings: FitSettings
    schedule: Schedule
    loss: HeadLoss
    base: str
    num_tokens: int


def run(options: argparse.Namespace) -> int:
    """Train, draw the curves and write the heads."""
    if options.joint:
        refuse_changed(options, add_arguments, "training on a frozen base", ("cache", "window", "weights"))
        return run_joint(options)
    refuse_changed(options, add_arguments, "--joint", JOINT_OPTIONS)
    for name in JOINT_OPTIONS:  # they do not belong to this run
        delattr(options, name)
    rows = check_batch(options)
    lm = load_base(options, weights=options.weights)
    examples = read_data(options, lm)
    mesh = build_mesh(options.mesh, lm.config, rows)
    base = lm.base_fingerprint
    lm.params = place_base(lm.params, lm.config, lm.backend, mesh)
    if not options.dry_run:
        claim_folder(options.out, {"base": base, **identity(options)})
    with step_progress("hidden states", len(examples)) as report:
        # A dry run uses only the first texts; only their number differs from a real run.
        tried = examples[: 2 * options.batch_size] if options.dry_run else examples
        folder = cache_folder(options)
        states = sample_states(lm, tried) if options.dry_run else cache_hidden_states(lm, tried, folder, report)
    task = plan(options, lm, states, base)
    optimizer = task.schedule.build_optimizer()
    state = start(task, lm, optimizer, options.seed)
    state, frozen = place_learned(state, mesh), {**task.frozen, "params": lm.params}
    step_settings = StepSettings(options.microbatches, options.compute_dtype, options.seed)
    step = compile_step(task.loss, optimizer, step_settings)
    order = Order(task.source.count, options.batch_size, options.seed)

    def batch_at(at: int) -> Windows:
        return place_batch(split_batch(task.source.take(order.at(at)), options.microbatches), mesh)

    if options.dry_run:
        num_states = sum(len(one.tokens) - first_state(one) for one in examples) * (1 - options.held_out)
        steps_per_epoch = num_states / options.window / options.batch_size
        num_steps = build_schedule(options, steps_per_epoch).num_steps
        print(*estimate(step, state, frozen, batch_at(0), num_steps), sep="\n")
        return 0
    held_out = WindowSource(task.held_out, options.window, options.heads, task.shape.target_rows(lm.config.vocab_size))
    evaluation = HeadEvaluation(lm.programs.decoder, frozen, held_out)
    title = f"heads for {options.model}"
    result = fit_and_draw(title, step, state, frozen, batch_at, task.settings, evaluation)
    if result.interrupted:
        return EXIT_INTERRUPTED
    accuracies, num_tokens = evaluation.accuracies(result.params), task.num_tokens
    export_heads(options, lm, task.base, task.shape, result.params, result, accuracies, num_tokens)
    return 0


def plan(options: argparse.Namespace, lm: LanguageModel, states: HiddenStates, base: str) -> Task:
    """Split the texts, choose the draft vocabulary, and count the steps."""
    _, held_out_texts = split_texts(states.num_texts, options.held_out, options.seed)
    trained, held_out = states.without(held_out_texts), states.select(held_out_texts)
    shape = read_shape(options, lm, trained.tokens_P[(trained.texts_P >= 0) & trained.predicted_P])
    source = WindowSource(trained, options.window, options.heads, shape.target_rows(lm.config.vocab_size))
    schedule = build_schedule(options, Order(source.count, options.batch_size, 0).steps_per_epoch)
    settings = fit_settings(options, schedule.num_steps, {"base": base, **identity(options)})
    loss = HeadLoss(lm.programs.decoder, options.decay, options.soft_targets, options.dropout)
    frozen = {"heads": frozen_heads(shape, lm.config, lm.params)}
    num_tokens = int(np.sum((trained.texts_P >= 0) & trained.predicted_P))
    return Task(shape, frozen, source, held_out, settings, schedule, loss, base, num_tokens)


def start(task: Task, lm: LanguageModel, optimizer: Any, seed: int) -> TrainState:
    """Draw the heads and start their optimizer."""
    heads = init_heads(task.shape, lm.config, lm.params, jax.random.key(seed))
    return TrainState(jnp.int32(0), heads, optimizer.init(heads))


def sample_states(lm: LanguageModel, examples: list[Example]) -> HiddenStates:
    """Return states of the right shapes, all zero."""
    lengths = [len(example.tokens) for example in examples]
    texts_P = np.repeat(np.arange(len(examples)), lengths)
    tokens_P = np.concatenate([example.tokens for example in examples]).astype(np.int32)
    hidden_PD = np.zeros((len(tokens_P), lm.config.model_dim), np.float16)
    return HiddenStates(hidden_PD, tokens_P, np.zeros_like(tokens_P), texts_P, np.ones(len(tokens_P), bool))


if __name__ == "__main__":
    sys.exit(run_command("medusa", "Train Medusa or Hydra heads that draft for a model.", add_arguments, run))
