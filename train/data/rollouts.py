"""Rollouts with scores: several answers to each prompt, drawn from a model, and what a checker says of them.

``train.value_head`` learns from them what an answer that has only begun will be worth. A file of rollouts is one of
``train.data distill``, with several lines a prompt, which have a ``sample`` and a ``score`` too. All answers of a
prompt are appended at once, so an interrupted run goes on with the next prompt.
"""

import argparse
import importlib
import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from jaxinfer.language_model import LanguageModel
from jaxinfer.results import GenerationResult
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.text_values import Candidate, Scorer, checked_values
from train.arguments import load_base
from train.command import number
from train.data.target_texts import Prompt, add_prompt_arguments, answered_lines, describe_recipe, encode_prompt
from train.loop.progress import step_progress
from train.texts.records import RecordWriter, read_records


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m train.data rollouts``."""
    parser.add_argument("--model", metavar="M", required=True, help="model that answers")
    parser.add_argument(
        "--scorer",
        metavar="MODULE:NAME",
        type=imported,
        required=True,
        help="function of a list of jaxinfer.Candidate, such as checks:right, that returns a number for each",
    )
    parser.add_argument(
        "--samples", metavar="N", type=number(int, 1), default=8, help="answers to a prompt (default: %(default)s)"
    )
    add_prompt_arguments(parser, temperature=1.0)


def imported(text: str) -> Scorer:
    """Return the function that ``MODULE:NAME`` names, as Python finds it from the folder that the command runs in."""
    module, _, name = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except Exception as error:  # a module that cannot be read may raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise argparse.ArgumentTypeError(f"{text!r} names no function: {reason}") from None
    if not callable(found):
        raise argparse.ArgumentTypeError(f"{text!r} is no function")
    return cast(Scorer, found)


def run(options: argparse.Namespace) -> int:
    """Write the rollouts of the prompts that have none yet."""
    sampling = SamplingParams(
        temperature=options.temperature, top_p=options.top_p, seed=options.seed, n=options.samples
    )
    records = read_records(options.prompts)
    with RecordWriter(options.out) as writer:  # opened before the slow loading of the model
        lm = load_base(options)
        prompts = [encode_prompt(lm, record, is_raw=options.raw) for record in records]
        scorer = _described(options.scorer)
        recipe = describe_recipe(lm, sampling, options.max_new_tokens, is_raw=options.raw, opening=scorer)
        done = answered_lines(options.out, prompts, recipe)
        left = [prompt for prompt in prompts if prompt.line not in done]
        scores: list[float] = []
        with step_progress("rollouts", len(prompts), len(done)) as report:
            for rollouts in roll_out(lm, left, options.scorer, sampling, options.max_new_tokens, options.batch_size):
                writer.append([{**one, "recipe": recipe} for one in rollouts])
                done.add(rollouts[0]["line"])
                scores += [one["score"] for one in rollouts]
                report(len(done), f"mean score {sum(scores) / len(scores):.3f}")
    mean = f", mean score {sum(scores) / len(scores):.3f}" if scores else ""
    print(f"{options.out}: rollouts of {len(done)} prompts, {len(scores)} of them new{mean}", file=sys.stderr)
    return 0


def _described(scorer: Scorer) -> str:
    """Return a scorer's name, and its module's text where there is one: another checker gives other scores."""
    name = f"{getattr(scorer, '__module__', '')}:{getattr(scorer, '__qualname__', repr(type(scorer)))}"
    try:
        return f"{name} {inspect.getsource(inspect.getmodule(scorer) or type(scorer))}"
    except (OSError, TypeError):
        return name


def roll_out(
    lm: LanguageModel,
    prompts: Sequence[Prompt],
    scorer: Scorer,
    sampling: SamplingParams,
    max_new_tokens: int,
    batch_size: int,
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rollouts of each prompt, ``sampling.n`` of them, as `train.data rollouts` writes them.

    ``scorer`` is a function as `LanguageModel.generate` takes it as ``value``; it is asked about whole answers. Raises
    InvalidOption where it does not return a finite number for each.
    """
    if not prompts:
        return
    batches = lm.generate_batches(
        [prompt.tokens for prompt in prompts],
        max_new_tokens=max_new_tokens,
        sampling=[replace(sampling, seed=sampling.seed + prompt.line) for prompt in prompts],
        batch_size=batch_size,
    )
    pending: list[GenerationResult] = []
    rest = iter(prompts)
    for results in batches:
        pending += results
        while len(pending) >= sampling.n:
            of_prompt, pending = pending[: sampling.n], pending[sampling.n :]
            yield _scored(lm, next(rest), of_prompt, scorer)


def _scored(
    lm: LanguageModel, prompt: Prompt, results: Sequence[GenerationResult], scorer: Scorer
) -> list[dict[str, Any]]:
    asked = [Candidate(prompt.text, prompt.tokens, result.text, tuple(result.tokens), True) for result in results]
    scores = checked_values(scorer(asked), len(asked))
    return [
        {
            "line": prompt.line,
            "category": prompt.category,
            "sample": sample,
            "prompt_tokens": list(prompt.tokens),
            "tokens": list(result.tokens),
            "text": result.text,
            "finish_reason": result.finish_reason,
            "score": score,
        }
        for sample, (result, score) in enumerate(zip(results, scores))
    ]
