"""``python -m train.value_head``: trains a value head for tree search on answers of a frozen model with scores.

The model's hidden states are computed once and kept on disk; the head, a small MLP, learns at every token of an answer
what the whole answer was worth. It writes the folder ``OUT/value``, which ``--strategy mcts:value=OUT/value`` loads.
"""

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoint.value_head import write_value_head
from jaxinfer.errors import InvalidOption
from jaxinfer.language_model import LanguageModel
from jaxinfer.models.value_head import init_value_head
from jaxinfer.notation import Params
from jaxinfer.ops.backend import Backend, choose_backend
from train.arguments import (
    add_cache_argument,
    add_data_arguments,
    add_run_arguments,
    add_step_arguments,
    add_weights_argument,
    cache_folder,
    check_batch,
    fit_settings,
    identity,
    load_base,
    prepare,
)
from train.command import EXIT_INTERRUPTED, number, run_command
from train.features.hidden_states import HiddenStates, cache_hidden_states, no_states
from train.loop.estimate import estimate
from train.loop.fit import FitResult, claim_folder, fit_and_draw
from train.loop.placement import build_mesh, place_base
from train.loop.progress import step_progress
from train.value_head.card import describe_value_head
from train.value_head.loss import ValueEvaluation, ValueLoss
from train.value_head.states import Rollout, ValueSource, read_rollouts, split_prompts

VALUE = "value"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m train.value_head``."""
    add_run_arguments(parser)
    add_weights_argument(parser)
    add_cache_argument(add_data_arguments(parser))
    head = parser.add_argument_group("head")
    head.add_argument(
        "--inner", metavar="N", type=number(int, 1), default=256, help="width of the head (default: %(default)s)"
    )
    add_step_arguments(parser, items="tokens", batch_size=256)


def run(options: argparse.Namespace) -> int:
    """Read the answers, train and write the head."""
    check_batch(options)
    lm = load_base(options, weights=options.weights)
    rollouts = [one for path in options.data for one in read_rollouts(path, lm)]
    return train(options, lm, rollouts, {"base": lm.base_fingerprint, **identity(options)})


def train_value_head(lm: LanguageModel, rollouts: Sequence[Rollout], out: Path, **changed: Any) -> Path | None:
    """Train a value head for a model on answers with scores; return its folder, None after an interrupt.

    ``out`` is the folder of the run, as ``--out`` is; ``changed`` are other options of the command, by their names:
    ``inner``, ``epochs``, ``batch_size``, ``learning_rate``, ``held_out``, ``seed`` and so on.
    """
    add_arguments(parser := argparse.ArgumentParser())
    options = parser.parse_args(["--data", __file__, "--out", str(out)])
    if unknown := sorted(changed.keys() - vars(options).keys()):
        raise InvalidOption(f"train_value_head has no option {unknown[0]!r}")
    vars(options).update(changed, data=[])
    check_batch(options)
    read = hashlib.sha256(repr([(one.tokens, one.num_prompt, one.score) for one in rollouts]).encode()).hexdigest()
    options.model = f"a model with the fingerprint {lm.base_fingerprint}"
    told = {"base": lm.base_fingerprint, **identity(options), "rollouts": read}
    return None if train(options, lm, rollouts, told) == EXIT_INTERRUPTED else options.out / VALUE


def train(options: argparse.Namespace, lm: LanguageModel, rollouts: Sequence[Rollout], told: dict[str, Any]) -> int:
    """Train on rollouts, draw the curves and write the head; ``told`` is what else the result depends on."""
    trained, held_out = split_prompts(rollouts, options.held_out, options.seed)
    scores = np.array([one.score for one in rollouts])
    mean, spread = float(scores[trained].mean()), float(scores[trained].std())
    if scores[trained].min() == scores[trained].max():
        raise InvalidOption(f"all answers have the score {mean:g}: a value head learns from scores that differ")
    mesh = build_mesh(options.mesh, lm.config, options.batch_size // options.microbatches)
    lm.params = place_base(lm.params, lm.config, lm.backend, mesh)
    if not options.dry_run:
        claim_folder(options.out, told)
    states = read_states(options, lm, rollouts)
    source, judged = (ValueSource.of(states, texts, scores, mean, spread) for texts in (trained, held_out))
    backend = head_backend(lm)
    head = init_value_head(lm.config.model_dim, options.inner, jax.random.key(options.seed))
    ready = prepare(options, ValueLoss(backend), head, source.count, lambda items, at: source.take(items), mesh)
    if options.dry_run:
        print(*estimate(ready.step, ready.state, {}, ready.batch_at(0), ready.num_steps), sep="\n")
        return 0
    settings, evaluation = fit_settings(options, ready.num_steps, told), ValueEvaluation(backend, judged, rollouts)
    title = f"value head for {options.model}"
    result = fit_and_draw(title, ready.step, ready.state, {}, ready.batch_at, settings, evaluation)
    if result.interrupted:
        return EXIT_INTERRUPTED
    export(options, told, result, evaluation, len(trained), (mean, spread))
    return 0


def head_backend(lm: LanguageModel) -> Backend:
    """Return how a head computes in training: in float32, as XLA differentiates it."""
    return choose_backend("float32", platform=lm.backend.platform, scan_layers=True)


def read_states(options: argparse.Namespace, lm: LanguageModel, rollouts: Sequence[Rollout]) -> HiddenStates:
    """Return the model's hidden states of all answers, zeros for a dry run."""
    examples = [one.example for one in rollouts]
    if options.dry_run:
        texts_P = np.repeat(np.arange(len(examples), dtype=np.int32), [len(example.tokens) for example in examples])
        return no_states(examples, lm.config.model_dim)._replace(texts_P=texts_P)
    with step_progress("hidden states", len(examples)) as report:
        return cache_hidden_states(lm, examples, cache_folder(options), report)


def export(
    options: argparse.Namespace,
    told: dict[str, Any],
    result: FitResult,
    evaluation: ValueEvaluation,
    num_answers: int,
    scores: tuple[float, float],
) -> None:
    """Write ``OUT/value`` with its card; an existing folder is replaced as a whole."""
    figures, folder = evaluation(result.params), options.out / VALUE
    card = describe_value_head(options.model, told, result, figures, num_answers, scores)
    head = in_units_of_scores(jax.device_get(result.params), *scores)
    beside = {"README.md": card}
    write_value_head(folder, head, base=options.model, base_fingerprint=told["base"], beside=beside, overwrite=True)
    print(
        f"{folder}: {result.best_step} steps, {figures['explained']:.2f} of the variance of held-out scores explained; "
        f"search with --strategy mcts:value={folder}",
        file=sys.stderr,
    )


def in_units_of_scores(head: Params, mean: float, spread: float) -> Params:
    """Return a head that was trained in units of the scores' spread around their mean as one of scores."""
    out = head["out"]
    return {**head, "out": {"kernel": out["kernel"] * spread, "bias": out["bias"] * spread + mean}}


if __name__ == "__main__":
    sys.exit(run_command("value_head", "Train a value head for tree search.", add_arguments, run))
