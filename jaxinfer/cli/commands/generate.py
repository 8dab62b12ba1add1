"""``jaxinfer generate``: continue prompts."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxinfer.cli.arguments import (
    add_adapter_argument,
    add_generation_arguments,
    add_model_arguments,
    add_sampling_arguments,
    sampling_options,
    whole_number,
)
from jaxinfer.cli.collection import without_collection
from jaxinfer.cli.output.draft_marks import DraftMarks, colours_drafts
from jaxinfer.cli.output.pace_notice import pace_lines
from jaxinfer.cli.output.start_table import start_lines
from jaxinfer.cli.output.stats_table import stats_lines
from jaxinfer.cli.processes import add_process_arguments, check_processes
from jaxinfer.cli.prompts import add_prompt_arguments, read_prompts
from jaxinfer.errors import InvalidOption
from jaxinfer.start_times import seconds_since_start

if TYPE_CHECKING:
    from jaxinfer.language_model import LanguageModel
    from jaxinfer.results import GenerationResult
    from jaxinfer.sampling.params import SamplingParams

_HEADING_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``generate``."""
    add_prompt_arguments(parser)
    parser.add_argument(
        "--chat", action="store_true", help="put each prompt into the model's chat template, and answer it"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object for each result and nothing else")
    add_model_arguments(parser)
    add_adapter_argument(parser)
    add_generation_arguments(parser, max_new_tokens=128)
    parser.add_argument(
        "--batch-size", metavar="N", type=whole_number(1), default=16, help="prompts at a time (default: 16)"
    )
    add_sampling_arguments(parser)
    add_process_arguments(parser)
    parser.add_argument(
        "--num-samples", metavar="N", type=whole_number(1), default=1, help="results for each prompt (default: 1)"
    )
    parser.add_argument("--logprobs", action="store_true", help="with --json: add the log-probability of each token")
    parser.add_argument(
        "--show-drafts",
        action="store_true",
        help="mark accepted tokens: green on a terminal, {+so+} elsewhere, as a list from_draft with --json",
    )


def run(options: argparse.Namespace) -> int:
    """Load the model and print what it says: as it comes for one prompt, in order and batch by batch for several."""
    if options.logprobs and not options.json:
        raise InvalidOption("--logprobs needs --json: add it")
    check_processes(options, options.prompt, options.prompts)
    prompts = read_prompts(options)
    with without_collection():
        # Imported here: what stands above is checked before JAX is waited for.
        from jaxinfer.cli.loading import adapter_of, load_model
        from jaxinfer.decoding.registry import parse_strategy
        from jaxinfer.sampling.params import SamplingParams

        sampling = SamplingParams(**sampling_options(options), n=options.num_samples, logprobs=options.logprobs)
        num_results = parse_strategy(options.strategy).num_results(sampling)
        is_streamed = len(prompts) == 1 and num_results == 1 and not options.json
        if options.show_drafts and not (is_streamed or options.json):
            raise InvalidOption("--show-drafts marks a single output: give one prompt and one sample, or add --json")
        import_seconds = seconds_since_start()
        model = load_model(options)
        inputs = [_encode(model, prompt, options.chat) for prompt in prompts]
    if is_streamed:
        result, first_token_seconds = _stream(model, inputs[0], sampling, options, adapter_of(options))
        batches = [[result]]
    else:
        adapter, first_token_seconds = adapter_of(options), None
        batches = _print_batches(model, prompts, inputs, num_results, sampling, options, adapter)
    if options.stats:
        print(*stats_lines([result.stats for batch in batches for result in batch]), sep="\n", file=sys.stderr)
        prefill_seconds = batches[0][0].stats.prefill_seconds
        print(*start_lines(model, import_seconds, prefill_seconds, first_token_seconds), sep="\n", file=sys.stderr)
        # Where rows are refilled, a request's times include what others did: they say nothing of plain decoding.
        num_rows = len(inputs) * (parse_strategy(options.strategy).rows_per_prompt or num_results)
        if not model.refills(num_rows, options.batch_size, options.strategy):
            first = [inputs[row // num_results] for row in range(len(batches[0]))]
            asked = options.max_new_tokens, sampling, adapter_of(options)
            lines = pace_lines(model, options.strategy, first, batches, *asked)
            print(*lines, sep="\n", end="\n" if lines else "", file=sys.stderr)
    return 0


def _encode(model: "LanguageModel", prompt: str, is_chat: bool) -> list[int]:
    if is_chat:
        return model.encode_chat([{"role": "user", "content": prompt}])
    return model.tokenizer.encode(prompt)


def _stream(
    model: "LanguageModel",
    prompt: list[int],
    sampling: "SamplingParams",
    options: argparse.Namespace,
    adapter: str | None,
) -> tuple["GenerationResult", float]:
    """Print a text as it comes; return it, and how long after the process began its first piece came."""
    asked = {"max_new_tokens": options.max_new_tokens, "sampling": sampling, "strategy": options.strategy}
    pieces = model.stream(prompt, **asked, adapter=adapter)
    result, first_token_seconds, marks = None, 0.0, DraftMarks(colours_drafts()) if options.show_drafts else None
    if marks is not None:
        print(marks.legend, file=sys.stderr)
    for piece in pieces:
        print(piece.text if marks is None else marks.mark(piece), end="", flush=True)
        first_token_seconds = first_token_seconds or seconds_since_start()
        result = piece.result
    print(flush=True)
    if result is None:
        raise AssertionError("the stream ended without a result")
    return result, first_token_seconds


def _print_batches(
    model: "LanguageModel",
    prompts: Sequence[str],
    inputs: Sequence[list[int]],
    num_results: int,
    sampling: "SamplingParams",
    options: argparse.Namespace,
    adapter: str | None,
) -> list[list["GenerationResult"]]:
    batches = model.generate_batches(
        inputs,
        max_new_tokens=options.max_new_tokens,
        sampling=sampling,
        strategy=options.strategy,
        batch_size=options.batch_size,
        adapter=adapter,
    )
    done: list[list[GenerationResult]] = []
    number = 0
    for batch in batches:
        done.append(batch)
        for result in batch:
            prompt = prompts[number // num_results]
            number += 1
            _print_json(prompt, result, options) if options.json else _print_text(prompt, result, number)
    return done


def _print_json(prompt: str, result: "GenerationResult", options: argparse.Namespace) -> None:
    fields = {
        "prompt": prompt,
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "stats": dataclasses.asdict(result.stats),
    }
    if result.logprobs:
        fields["logprobs"] = result.logprobs
    if options.show_drafts:
        fields["from_draft"] = result.from_draft
    print(json.dumps(fields), flush=True)


def _print_text(prompt: str, result: "GenerationResult", number: int) -> None:
    shown = " ".join(prompt.split())
    if len(shown) > _HEADING_WIDTH:
        shown = f"{shown[: _HEADING_WIDTH - 3]}..."
    print(f"[{number}] {shown}\n{result.text}\n", flush=True)
