"""``python -m train.dflash``: trains a drafter that drafts a block in one pass, for a frozen model (2602.06036).

The hidden states that it reads are computed once and kept on disk. It writes the folder ``OUT/dflash``, in the
published layout, which ``--strategy dflash:heads=OUT/dflash`` loads.
"""

import argparse
import sys
from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxinfer.errors import InvalidOption
from jaxinfer.language_model import LanguageModel
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.drafters.dflash import DFlashConfig, dflash_for, init_dflash
from jaxinfer.models.drafters.heads import vocabulary_rows
from jaxinfer.notation import Params
from train.arguments import (
    add_cache_argument,
    add_data_arguments,
    add_loss_vocab_argument,
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
)
from train.command import EXIT_INTERRUPTED, number, run_command
from train.dflash.evaluation import DFlashEvaluation
from train.dflash.export import export_dflash
from train.dflash.loss import DFlashLoss
from train.features.hidden_states import HiddenStates, cache_hidden_states, no_states
from train.heads.loss import frequent_tokens, target_rows
from train.loop.estimate import estimate
from train.loop.fit import claim_folder, fit_and_draw
from train.loop.placement import build_mesh, place_base, replicate
from train.loop.progress import step_progress
from train.streams.rows import RowSource
from train.texts.packing import Example
from train.texts.rows import split_texts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m train.dflash``."""
    whole = number(int, 1)
    add_run_arguments(parser)
    add_weights_argument(parser)
    data = add_data_arguments(parser)
    add_cache_argument(data)
    drafter = parser.add_argument_group("drafter")
    drafter.add_argument("--layers", metavar="N", type=whole, default=2, help="its layers (default: %(default)s)")
    drafter.add_argument(
        "--ffn", metavar="N", type=whole, help="width of their feed-forward parts (default: the base model's)"
    )
    drafter.add_argument(
        "--block-size",
        metavar="N",
        type=number(int, 2, 64),
        default=8,
        help="places of a block, the current token's included (default: %(default)s)",
    )
    drafter.add_argument(
        "--features",
        metavar="LAYER",
        type=whole,
        nargs="+",
        help="the base model's layers whose inputs it reads (default: as many as its own, and 3 at least, evenly)",
    )
    drafter.add_argument(
        "--mask-token",
        metavar="ID",
        type=number(int, 0),
        help="token of unknown places (default: the one that ends texts)",
    )
    loss = parser.add_argument_group("loss")
    loss.add_argument(
        "--gamma",
        metavar="X",
        type=number(float, 1e-3),
        help="the weight of place k in the loss is exp(-(k - 1) / X) (default: half the block's size)",
    )
    add_soft_targets_argument(loss)
    add_loss_vocab_argument(loss)
    steps = add_step_arguments(parser, items="rows", batch_size=8, learning_rate=1e-3)
    add_row_length_argument(steps)
    steps.add_argument(
        "--anchors",
        metavar="N",
        type=whole,
        default=64,
        help="blocks of each row in a step (default: %(default)s)",
    )


class Task(NamedTuple):
    """Everything that a run needs before its first step; ``output`` are the rows of the loss vocabulary."""

    source: RowSource
    held_out: RowSource
    output: Params
    loss: DFlashLoss


def run(options: argparse.Namespace) -> int:
    """Train, draw the curves, and write the drafter."""
    rows = check_batch(options)
    lm = load_base(options, weights=options.weights)
    dflash = read_shape(options, lm)
    examples = read_data(options, lm, options.row_length)
    mesh = build_mesh(options.mesh, lm.config, rows)
    told = {"base": lm.base_fingerprint, **identity(options)}
    lm.params = place_base(lm.params, lm.config, lm.backend, mesh)
    if not options.dry_run:
        claim_folder(options.out, told)
    task = plan(options, lm, dflash, examples, read_states(options, lm, dflash, examples))
    frozen = {"params": lm.params, **replicate(task.output, mesh)}
    ready = prepare(
        options,
        task.loss,
        init_dflash(dflash, task.loss.backend, options.seed),
        task.source.count,
        task.source.sample,
        mesh,
    )
    if options.dry_run:
        print(*estimate(ready.step, ready.state, frozen, ready.batch_at(0), ready.num_steps), sep="\n")
        return 0
    evaluation = DFlashEvaluation(task.loss, lm.params, task.held_out)
    settings = fit_settings(options, ready.num_steps, told)
    title = f"DFlash drafter for {options.model}"
    result = fit_and_draw(title, ready.step, ready.state, frozen, ready.batch_at, settings, evaluation)
    if result.interrupted:
        return EXIT_INTERRUPTED
    export_dflash(options, lm, dflash, result, evaluation.agreement(result.params), task.source.num_candidates)
    return 0


def read_shape(options: argparse.Namespace, lm: LanguageModel) -> DFlashConfig:
    """Return the network that the options describe; raise InvalidOption for one that does not suit the model."""
    config: DecoderConfig = lm.config
    features, most = tuple(sorted(set(options.features or ()))), config.num_layers - 1
    if most < 1:
        raise InvalidOption("the base has a single layer, whose input is no more than its tokens: take another drafter")
    if features and features[-1] > most:
        raise InvalidOption(f"--features {features[-1]}: the base has the layers 1 to {most} after its first, layer 0")
    mask_token = options.mask_token
    if mask_token is None:
        mask_token = next((one for one in lm.eos_token_ids if one < config.vocab_size), 0)
    if mask_token >= config.num_tokens:
        raise InvalidOption(f"--mask-token {mask_token}: the base has the tokens 0 to {config.num_tokens - 1}")
    _, head_dim = config.own_heads
    if head_dim % 2:
        raise InvalidOption(f"the base's heads of {head_dim} channels cannot turn in pairs: take another drafter")
    return dflash_for(config, options.layers, options.block_size, mask_token, features, options.ffn)


def read_states(
    options: argparse.Namespace, lm: LanguageModel, dflash: DFlashConfig, examples: list[Example]
) -> HiddenStates:
    """Return the states that the drafter and, for soft targets, the output matrix read; zeros for a dry run."""
    layers = (*dflash.features, *([lm.config.num_layers] if options.soft_targets else []))
    if options.dry_run:
        return no_states(examples, len(layers) * lm.config.model_dim)
    with step_progress("hidden states", len(examples)) as report:
        return cache_hidden_states(lm, examples, cache_folder(options), report, layers=layers)


def plan(
    options: argparse.Namespace, lm: LanguageModel, dflash: DFlashConfig, examples: list[Example], states: HiddenStates
) -> Task:
    """Split the texts, pack them, and choose the loss vocabulary."""
    config, ids = lm.config, None
    trained, held_out = split_texts(len(examples), options.held_out, options.seed)
    if options.loss_vocab is not None and options.loss_vocab < config.vocab_size:
        tokens = np.concatenate([np.asarray(examples[at].tokens)[list(examples[at].mask)] for at in trained])
        ids = frequent_tokens(tokens, config.vocab_size, options.loss_vocab)
    output = {} if ids is None else {"output": vocabulary_rows(config, lm.params, jnp.asarray(ids, jnp.int32))}

    def source(texts: np.ndarray, rows_V: np.ndarray) -> RowSource:
        return RowSource(examples, states, texts, options.row_length, options.anchors, options.seed, rows_V)

    trained_source = source(trained, target_rows(config.vocab_size, ids))
    held_out_source = source(held_out, target_rows(config.vocab_size, None))
    for name, found in (("train on", trained_source), ("judge by", held_out_source)):
        if not found.count:
            raise InvalidOption(f"no text has the three tokens that it takes to {name}: give longer ones")
    own = replace(lm.backend, param_dtype="float32", compute_dtype="float32")
    gamma = options.gamma or dflash.block_size / 2
    loss = DFlashLoss(lm.programs.decoder, dflash, own, gamma, options.soft_targets)
    return Task(trained_source, held_out_source, output, loss)


if __name__ == "__main__":
    sys.exit(run_command("dflash", "Train a DFlash drafter, which drafts a block in one pass.", add_arguments, run))
