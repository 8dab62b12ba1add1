"""Prompts that a chat model writes itself, for data distillation: training its drafters then needs no data set.

A chat model has learned what its users ask. Given its template up to the start of the user's text, it continues with
such a text (Magpie, Xu et al. 2024, arXiv:2406.08464). Each draw is sampled with a seed of its own, so the same options
give the same prompts, even if the run is interrupted.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from jaxinfer.errors import InvalidOption
from jaxinfer.language_model import LanguageModel
from jaxinfer.model_loading import DEFAULT_MODEL, load
from jaxinfer.sampling.params import SamplingParams
from train.arguments import add_answer_arguments
from train.command import number
from train.data.target_texts import describe_recipe
from train.loop.progress import step_progress
from train.texts.records import RecordWriter, read_written

CATEGORY = "self-written"
# After this many draws without a new prompt, further draws would not help.
_MOST_IN_VAIN = 512
# Two user texts with different starts and ends: what their conversations share is the template around them.
_PROBES = ("Apple zest", "Which bike")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m train.data prompts``."""
    parser.add_argument("--model", metavar="M", default=DEFAULT_MODEL, help="chat model (default: %(default)s)")
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="JSONL file to append to")
    parser.add_argument(
        "--count", metavar="N", type=number(int, 1), default=1000, help="number of prompts (default: %(default)s)"
    )
    add_answer_arguments(parser, max_new_tokens=96, batch_size=64)
    parser.add_argument("--temperature", metavar="T", type=number(float, 0), default=1.0, help="default: %(default)s")
    parser.add_argument("--top-p", metavar="P", type=number(float, 0, 1), default=0.95, help="default: %(default)s")
    parser.add_argument(
        "--seed",
        metavar="N",
        type=number(int, 0, 2**30),
        default=0,
        help="another one gives other prompts (default: 0)",
    )


def run(options: argparse.Namespace) -> int:
    """Write prompts until there are ``count``."""
    # Room for the draws of each seed, or the next one would give the same prompts.
    first = options.seed << 32
    sampling = SamplingParams(temperature=options.temperature, top_p=options.top_p, seed=first)
    with RecordWriter(options.out) as writer:  # opened before the slow loading of the model
        lm = load(options.model, dtype=options.dtype, notice=lambda line: print(line, file=sys.stderr))
        opening, ending = around_user_text(lm)
        sampling = dataclasses.replace(sampling, stop=(ending,) if ending else ())
        recipe = describe_recipe(lm, sampling, options.max_new_tokens, is_raw=True, opening=opening)
        seen, next_draw = written_prompts(options.out, recipe)
        num_draws = in_vain = 0
        with step_progress("prompts", options.count, len(seen)) as report:
            while len(seen) < options.count:
                draws = range(next_draw, next_draw + options.batch_size)
                prompts = []
                for draw, text in write_prompts(lm, opening, draws, sampling, options.max_new_tokens):
                    if text not in seen and len(seen) < options.count:
                        seen.add(text)
                        prompts.append({"prompt": text, "category": CATEGORY, "draw": draw, "recipe": recipe})
                writer.append(prompts)
                num_draws, next_draw = num_draws + len(draws), draws.stop
                in_vain = 0 if prompts else in_vain + len(draws)
                report(len(seen), f"{num_draws:,} drawn")
                if in_vain >= _MOST_IN_VAIN:
                    raise InvalidOption(
                        f"no new prompt in {in_vain} drawn texts, after {len(seen)}: raise --temperature or "
                        "--max-new-tokens, or name a chat model, and give another --out"
                    )
    print(f"{options.out}: {len(seen)} prompts, {num_draws} texts drawn", file=sys.stderr)
    return 0


def around_user_text(lm: LanguageModel) -> tuple[str, str]:
    """Return the template before a user's first text, and the string that ends that text if no stop token does."""
    lm.encode_chat([{"role": "user", "content": _PROBES[0]}])  # raises if there is no template
    template = lm.tokenizer.chat_template
    assert template is not None
    texts = [template.render([{"role": "user", "content": probe}]) for probe in _PROBES]
    before = _common_start(texts)
    if not before or not all(probe in text for text, probe in zip(texts, _PROBES)):
        raise InvalidOption("the chat template has nothing before a user's text: get prompts from elsewhere")
    after = _common_start([text.partition(probe)[2] for text, probe in zip(texts, _PROBES)])
    first_line = after.strip().partition("\n")[0]
    first_ids = lm.tokenizer.encode(first_line, add_special_tokens=False)
    if not first_ids or first_ids[0] in lm.eos_token_ids:
        return before, ""
    if first_line not in lm.tokenizer.decode(first_ids):
        raise InvalidOption(f"the chat template ends a user's text with {first_line!r}, which stops no generation")
    return before, first_line


def _common_start(texts: Sequence[str]) -> str:
    return "".join(letters[0] for letters in takewhile(lambda letters: len(set(letters)) == 1, zip(*texts)))


def write_prompts(
    lm: LanguageModel, opening: str, draws: range, sampling: SamplingParams, max_new_tokens: int
) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of every draw that is a complete prompt."""
    opening_ids = lm.tokenizer.encode(opening, add_special_tokens=False)
    results = lm.generate(
        [opening_ids] * len(draws),
        max_new_tokens=max_new_tokens,
        sampling=[dataclasses.replace(sampling, seed=sampling.seed + draw) for draw in draws],
        batch_size=len(draws),
    )
    for draw, result in zip(draws, results, strict=True):
        text = result.text.strip()
        if text and result.finish_reason == "stop":
            yield draw, text


def written_prompts(path: Path, recipe: str) -> tuple[set[str], int]:
    """Return a file's prompts and the number of the next draw; raises InvalidOption if another recipe made them."""
    seen: set[str] = set()
    next_draw = 0
    for at, record in enumerate(read_written(path), 1):
        fields: dict[str, Any] = dict(record)
        if fields.get("recipe") != recipe or not isinstance(fields.get("draw"), int):
            raise InvalidOption(f"{path}, line {at}: was made by another model or other options; give another --out")
        seen.add(fields["prompt"])
        next_draw = fields["draw"] + 1
    return seen, next_draw
