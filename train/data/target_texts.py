"""Data distillation: a model answers prompts, and drafters are trained on its answers.

A drafter must predict the model, so the model's own outputs teach it more than other texts. The file of answers has one
JSON object per line: ``line`` and ``category`` of the prompt, ``prompt_tokens``, ``tokens`` (the answer's), ``text``,
``finish_reason``, and ``recipe``, a fingerprint of the model's weights and the sampling settings. Batches are only
appended, so an interrupted run continues where it stopped.
"""

import argparse
import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.errors import InvalidOption, JaxinferError
from jaxinfer.language_model import LanguageModel
from jaxinfer.model_loading import DEFAULT_MODEL, load
from jaxinfer.models.fingerprint import fingerprint
from jaxinfer.sampling.params import SamplingParams
from train.arguments import add_answer_arguments
from train.command import existing_file, number
from train.loop.progress import step_progress
from train.texts.records import Record, RecordWriter, messages_of, read_records, read_written

# Prompts are sorted by length within this many batches: a batch needs little padding, and every part is a mixture.
_BATCHES_SORTED = 8


class Prompt(NamedTuple):
    """A prompt's token ids, its line number, and the text that is to be answered."""

    line: int
    category: str
    tokens: tuple[int, ...]
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m train.data distill``."""
    parser.add_argument("--model", metavar="M", default=DEFAULT_MODEL, help="model that answers (default: %(default)s)")
    add_prompt_arguments(parser, temperature=0.0)


def add_prompt_arguments(parser: argparse.ArgumentParser, temperature: float) -> None:
    """Add the arguments of commands that have prompts answered."""
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        type=existing_file,
        required=True,
        help="JSONL file; each line has 'prompt', 'turns' or 'messages', and may have 'category'",
    )
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="JSONL file to append to")
    parser.add_argument("--raw", action="store_true", help="continue prompts without the model's chat template")
    add_answer_arguments(parser, max_new_tokens=256, batch_size=32)
    parser.add_argument(
        "--temperature",
        metavar="T",
        type=number(float, 0),
        default=temperature,
        help="0 is greedy (default: %(default)s)",
    )
    parser.add_argument("--top-p", metavar="P", type=number(float, 0, 1), default=1.0, help="default: %(default)s")
    parser.add_argument(
        "--seed", metavar="N", type=number(int, 0, 2**31 - 1), default=0, help="prompt N uses seed + N (default: 0)"
    )


def run(options: argparse.Namespace) -> int:
    """Answer the prompts that have no answer yet."""
    sampling = SamplingParams(temperature=options.temperature, top_p=options.top_p, seed=options.seed)
    records = read_records(options.prompts)
    with RecordWriter(options.out) as writer:  # opened before the slow loading of the model
        lm = load(options.model, dtype=options.dtype, notice=lambda line: print(line, file=sys.stderr))
        prompts = [encode_prompt(lm, record, is_raw=options.raw) for record in records]
        recipe = describe_recipe(lm, sampling, options.max_new_tokens, is_raw=options.raw)
        done = answered_lines(options.out, prompts, recipe)
        num_tokens = 0
        with step_progress("distill", len(prompts), len(done)) as report:
            for answers in answer(lm, prompts, done, sampling, options.max_new_tokens, options.batch_size):
                writer.append([{**one, "recipe": recipe} for one in answers])
                done |= {one["line"] for one in answers}
                num_tokens += sum(len(one["tokens"]) for one in answers)
                report(len(done), f"{num_tokens:,} tokens")
    print(f"{options.out}: {len(done)} answers, {num_tokens:,} tokens of them new", file=sys.stderr)
    return 0


def encode_prompt(lm: LanguageModel, record: Record, *, is_raw: bool = False) -> Prompt:
    """Return a record's prompt in the model's chat template, or only its text if ``is_raw``."""
    messages = messages_of(record)
    if messages is None:
        raise InvalidOption(f"{record.where}: needs a 'prompt', 'turns' or 'messages'")
    if messages[-1]["role"] == "assistant":
        raise InvalidOption(f"{record.where}: ends with an answer; end with the user's text, which is to be answered")
    try:
        tokens = lm.tokenizer.encode(messages[-1]["content"]) if is_raw else lm.encode_chat(messages)
    except JaxinferError as error:
        raise InvalidOption(f"{record.where}: {error}") from None
    if len(tokens) >= lm.max_len:
        raise InvalidOption(
            f"{record.where}: the prompt has {len(tokens)} tokens, but the model's context of {lm.max_len} needs room "
            "for the answer; shorten it"
        )
    return Prompt(record.line, str(record.fields.get("category", "")), tuple(tokens), messages[-1]["content"])


def describe_recipe(
    lm: LanguageModel, sampling: SamplingParams, max_new_tokens: int, *, is_raw: bool, opening: str = ""
) -> str:
    """Return a fingerprint of everything that an answer depends on besides its prompt; all begin with ``opening``."""
    facts = [fingerprint(lm.params), lm.backend.param_dtype, dataclasses.asdict(sampling), max_new_tokens, is_raw]
    facts += [opening] if opening else []
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def answered_lines(path: Path, prompts: list[Prompt], recipe: str) -> set[int]:
    """Return the lines that have an answer; raises InvalidOption if it answers another prompt or has another recipe."""
    by_line = {prompt.line: prompt for prompt in prompts}
    done = set()
    for at, answer in enumerate(read_written(path), 1):
        prompt = by_line.get(answer.get("line", 0))
        if prompt is None or list(prompt.tokens) != answer.get("prompt_tokens"):
            raise InvalidOption(f"{path}, line {at}: answers none of these prompts; give another --out")
        if answer.get("recipe") != recipe:
            raise InvalidOption(f"{path}, line {at}: was made by another model or other options; give another --out")
        done.add(prompt.line)
    return done


def answer(
    lm: LanguageModel,
    prompts: list[Prompt],
    done: set[int],
    sampling: SamplingParams,
    max_new_tokens: int,
    batch_size: int,
) -> Iterator[list[dict[str, Any]]]:
    """Yield batches of answers to prompts that are not ``done``, in an order of its own."""
    order = np.random.default_rng(0).permutation(len(prompts))
    shuffled = [prompts[at] for at in order if prompts[at].line not in done]
    stride = batch_size * _BATCHES_SORTED
    pending: list[Prompt] = []
    for start in range(0, len(shuffled), stride):
        pending += sorted(shuffled[start : start + stride], key=lambda prompt: len(prompt.tokens))
    if not pending:
        return
    batches = lm.generate_batches(
        [prompt.tokens for prompt in pending],
        max_new_tokens=max_new_tokens,
        sampling=[dataclasses.replace(sampling, seed=sampling.seed + prompt.line) for prompt in pending],
        batch_size=batch_size,
    )
    rest = iter(pending)
    for results in batches:
        yield [
            {
                "line": prompt.line,
                "category": prompt.category,
                "prompt_tokens": list(prompt.tokens),
                "tokens": list(result.tokens),
                "text": result.text,
                "finish_reason": result.finish_reason,
            }
            for result, prompt in zip(results, rest)  # results first: no prompt is consumed without one
        ]
