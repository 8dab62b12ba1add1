"""``python -m train.streams``: trains streams, which draft while the model verifies (Bhendawade et al., 2402.11131).

By default the model is frozen: the states that streams start from are computed once and kept on disk, and only the
streams are trained. ``--joint`` also trains adapters of the model and merges them into a new model, ``OUT/model``. The
folder ``OUT/streams`` is what ``--strategy streams:heads=OUT/streams`` loads.
"""

import argparse
import sys
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.errors import InvalidOption
from jaxinfer.language_model import LanguageModel
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.drafters.heads import vocabulary_rows
from jaxinfer.models.drafters.streams import StreamsConfig, init_streams
from jaxinfer.notation import Params
from train.arguments import (
    add_cache_argument,
    add_data_arguments,
    add_loss_vocab_argument,
    add_remat_argument,
    add_row_length_argument,
    add_run_arguments,
    add_soft_targets_argument,
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
    refuse_few_bits,
)
from train.command import EXIT_INTERRUPTED, number, run_command
from train.features.hidden_states import HiddenStates, cache_hidden_states, no_states
from train.heads.loss import frequent_tokens, target_rows
from train.loop.estimate import estimate
from train.loop.fit import claim_folder, fit_and_draw
from train.loop.operations import forward_operations
from train.loop.placement import build_mesh, place_base, replicate
from train.loop.progress import step_progress
from train.model.lora import init_lora
from train.streams.evaluation import StreamEvaluation
from train.streams.export import export_streams
from train.streams.loss import StreamLoss
from train.streams.rows import RowSource
from train.texts.packing import Example
from train.texts.rows import split_texts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m train.streams``."""
    whole, positive = number(int, 1), number(float, 1e-9)
    add_run_arguments(parser)
    add_weights_argument(parser)
    data = add_data_arguments(parser)
    add_cache_argument(data)
    streams = parser.add_argument_group("streams")
    streams.add_argument(
        "--streams", metavar="J", type=whole, default=3, help="streams of each token (default: %(default)s)"
    )
    streams.add_argument(
        "--layers", metavar="N", type=whole, default=4, help="the last N layers have streams (default: %(default)s)"
    )
    streams.add_argument(
        "--rank", metavar="R", type=whole, default=8, help="rank of the streams' first states (default: %(default)s)"
    )
    streams.add_argument(
        "--exit-rank", metavar="R", type=whole, default=8, help="rank of the early exit (default: %(default)s)"
    )
    help_rank = "rank of the adapters on streams; 0 has none (default: %(default)s)"
    streams.add_argument("--adapter-rank", metavar="R", type=number(int, 0), default=8, help=help_rank)
    loss = parser.add_argument_group("loss")
    help_alpha = "weight of each stream in the loss; the last one counts for all that follow (default: 1, joint 0.1)"
    loss.add_argument("--alpha", metavar="X", type=positive, nargs="+", help=help_alpha)
    add_soft_targets_argument(loss)
    add_loss_vocab_argument(loss)
    joint = parser.add_argument_group("joint training")
    joint.add_argument("--joint", action="store_true", help="train the model together with its streams")
    joint.add_argument(
        "--lora-rank", metavar="R", type=whole, default=8, help="rank of the model's adapters (default: %(default)s)"
    )
    joint.add_argument(
        "--lora-alpha", metavar="X", type=positive, default=16.0, help="scale of the adapters (default: %(default)s)"
    )
    add_remat_argument(joint)
    steps = add_step_arguments(parser, items="rows", batch_size=8, learning_rate=2e-3)
    add_row_length_argument(steps)
    steps.add_argument(
        "--positions",
        metavar="N",
        type=whole,
        default=128,
        help="positions of each row that have streams in a step (default: %(default)s)",
    )


class Task(NamedTuple):
    """Everything that a run needs before its first step; ``output`` are the rows of the loss vocabulary."""

    streams: StreamsConfig
    source: RowSource
    held_out: RowSource
    output: Params
    loss: StreamLoss


def run(options: argparse.Namespace) -> int:
    """Train, draw the curves, and write the streams and, if it has changed, the model."""
    rows = check_batch(options)
    if options.joint:
        refuse_changed(options, add_arguments, "training on a frozen base", ("cache", "weights"))
    else:
        refuse_changed(options, add_arguments, "--joint", ("lora_rank", "lora_alpha", "remat"))
    # Scanned for joint training: compiling a step through all layers, unrolled, and back takes minutes.
    scan_layers = True if options.joint else None
    lm = load_base(options, weights=options.weights, scan_layers=scan_layers)
    if options.joint:
        refuse_few_bits(lm.params, f"--model {options.model}")
    if options.layers >= lm.config.num_layers:
        raise InvalidOption(
            f"--layers {options.layers} leaves none without streams of the model's {lm.config.num_layers}: "
            f"take at most {lm.config.num_layers - 1}"
        )
    examples = read_data(options, lm, options.row_length)
    mesh = build_mesh(options.mesh, lm.config, rows)
    told = {"base": lm.base_fingerprint, **identity(options)}
    lm.params = place_base(lm.params, lm.config, lm.backend, mesh)
    if not options.dry_run:
        claim_folder(options.out, told)
    task = plan(options, lm, examples, read_states(options, lm, examples))
    frozen = {"params": lm.params, **replicate(task.output, mesh)}
    ready = prepare(options, task.loss, start(options, lm, task.streams), task.source.count, task.source.sample, mesh)
    if options.dry_run:
        # Joint training scans over layers, whose operations a compiler counts once: one forward pass and two for the
        # backward.
        tokens = options.batch_size * options.row_length
        operations = 3 * forward_operations(lm.config, tokens, options.row_length) if options.joint else None
        print(*estimate(ready.step, ready.state, frozen, ready.batch_at(0), ready.num_steps, operations), sep="\n")
        return 0
    evaluation = StreamEvaluation(task.loss.decoder, options.layers, lm.params, task.held_out, task.loss.lora_scale)
    settings = fit_settings(options, ready.num_steps, told)
    title = f"streams for {options.model}"
    result = fit_and_draw(title, ready.step, ready.state, frozen, ready.batch_at, settings, evaluation)
    if result.interrupted:
        return EXIT_INTERRUPTED
    accuracies = evaluation.accuracies(result.params)
    export_streams(options, lm, task.streams, result, accuracies, task.source.num_candidates, task.loss.lora_scale)
    return 0


def read_states(options: argparse.Namespace, lm: LanguageModel, examples: list[Example]) -> HiddenStates | None:
    """Return the states that streams start from, zeros for a dry run; None if training changes them."""
    if options.joint:
        return None
    if options.dry_run:
        return no_states(examples, lm.config.model_dim)
    with step_progress("hidden states", len(examples)) as report:
        folder = cache_folder(options)
        return cache_hidden_states(lm, examples, folder, report, options.layers)


def plan(options: argparse.Namespace, lm: LanguageModel, examples: list[Example], states: HiddenStates | None) -> Task:
    """Split the texts, pack them, and choose the loss vocabulary."""
    config, ids = lm.config, None
    trained, held_out = split_texts(len(examples), options.held_out, options.seed)
    if options.loss_vocab is not None and options.loss_vocab < config.vocab_size:
        tokens = np.concatenate([np.asarray(examples[at].tokens)[list(examples[at].mask)] for at in trained])
        ids = frequent_tokens(tokens, config.vocab_size, options.loss_vocab)
    output = {} if ids is None else {"output": vocabulary_rows(config, lm.params, jnp.asarray(ids, jnp.int32))}

    def source(texts: np.ndarray, rows_V: np.ndarray) -> RowSource:
        sizes = (options.row_length, options.positions, options.seed)
        return RowSource(examples, states, texts, *sizes, rows_V, to_the_end=options.joint)

    trained_source = source(trained, target_rows(config.vocab_size, ids))
    held_out_source = source(held_out, target_rows(config.vocab_size, None))
    for name, found in (("train on", trained_source), ("judge by", held_out_source)):
        if not found.count:
            raise InvalidOption(f"no text has the three tokens that it takes to {name}: give longer ones")
    decoder = Decoder(config, replace(lm.backend, remat_layers=options.remat))
    alpha = tuple(options.alpha or [0.1 if options.joint else 1.0])
    loss = StreamLoss(decoder, options.layers, alpha, options.soft_targets, options.lora_alpha / options.lora_rank)
    streams = StreamsConfig(options.streams, options.layers, options.rank, options.exit_rank, options.adapter_rank)
    return Task(streams, trained_source, held_out_source, output, loss)


def start(options: argparse.Namespace, lm: LanguageModel, streams: StreamsConfig) -> dict[str, Any]:
    """Draw the trained parameters, in float32."""
    streams_key, lora_key = jax.random.split(jax.random.key(options.seed))
    drawn = init_streams(streams, lm.config, replace(lm.backend, param_dtype="float32"), streams_key)
    return {"streams": drawn, **({"lora": init_lora(lm.params, options.lora_rank, lora_key)} if options.joint else {})}


if __name__ == "__main__":
    sys.exit(
        run_command("streams", "Train speculative streams that draft in a model's top layers.", add_arguments, run)
    )
