"""``jaxinfer verify``: an audit, on the user's own weights, that a strategy changes nothing."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.arguments import (
    add_model_arguments,
    add_sampling_arguments,
    positive_number,
    sampling_options,
    whole_number,
)
from jaxinfer.cli.output.verify_report import bisect_line, prompt_line, summarize, verdict_lines
from jaxinfer.cli.prompts import add_prompt_arguments, read_prompts
from jaxinfer.cli.sample_prompts import SAMPLE_PROMPTS

if TYPE_CHECKING:
    from jaxinfer.bench.identity.audit import TextAudit
    from jaxinfer.bench.identity.bisect import Difference
    from jaxinfer.language_model import LanguageModel

EXIT_UNEXPLAINED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``verify``."""
    parser.add_argument(
        "--strategy", metavar="S", required=True, help="the strategy to check: NAME or NAME:key=value,..."
    )
    add_prompt_arguments(parser)
    parser.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument(
        "--max-new-tokens", metavar="N", type=whole_number(1), default=64, help="for each prompt (default: 64)"
    )
    parser.add_argument(
        "--batch-size",
        metavar="N",
        type=whole_number(1),
        default=4,
        help="prompts that the strategy runs at a time; plain decoding runs each alone (default: 4)",
    )
    parser.add_argument(
        "--tolerance",
        metavar="X",
        type=positive_number,
        help="where bits may differ, a smaller margin explains a divergence (default: 1e-4 in float32, more in narrow "
        "dtypes); with the CPU kernels nothing does",
    )
    parser.add_argument(
        "--bisect",
        action="store_true",
        help="then look for the first operation whose bits depend on the batch, a cut, a tree or the cache; the exit "
        "code stays",
    )
    add_model_arguments(parser, dtype="float32")
    add_sampling_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Compare prompt by prompt; return 0 where all texts are identical or, if bits may differ, explained, else 1."""
    is_given = options.prompt is not None or options.prompts is not None
    prompts = read_prompts(options) if is_given else list(SAMPLE_PROMPTS)
    # Imported here: what stands above is checked before JAX is waited for.
    from jaxinfer.bench.identity.audit import NUMERIC_ERROR, audit_texts
    from jaxinfer.bench.identity.bisect import bisect_texts, check_bisects
    from jaxinfer.cli.loading import load_model
    from jaxinfer.decoding.registry import parse_strategy
    from jaxinfer.sampling.params import SamplingParams

    sampling = SamplingParams(**sampling_options(options))
    strategy = parse_strategy(options.strategy)
    strategy.num_results(sampling)
    model = load_model(options)
    if options.bisect:
        check_bisects(model)
    tolerance = options.tolerance or dict(NUMERIC_ERROR)[str(model.backend.param_dtype)]
    encoded = _encode(model, prompts, options.chat)
    audits: list[TextAudit] = []
    for audit in audit_texts(
        model,
        encoded,
        options.strategy,
        sampling,
        max_new_tokens=options.max_new_tokens,
        batch_size=options.batch_size,
        tolerance=tolerance,
    ):
        audits.append(audit)
        if not options.json:
            print(prompt_line(len(audits), audit, tolerance, model.tokenizer), flush=True)
    report = summarize(options.strategy, strategy.exactness, str(model.backend.param_dtype), tolerance, audits)
    found = None
    if options.bisect:
        found = bisect_texts(model, [[*ids, *audit.plain_tokens] for ids, audit in zip(encoded, audits)])
    if options.json:
        texts = [{"prompt": prompt, **dataclasses.asdict(audit)} for prompt, audit in zip(prompts, audits)]
        bisected = {"bisect": found and _described(*found)} if options.bisect else {}
        print(json.dumps({**dataclasses.asdict(report), **bisected, "texts": texts}))
    else:
        print(*([bisect_line(found)] if options.bisect else []), *verdict_lines(report), sep="\n")
    sys.stdout.flush()
    return 0 if report.passes else EXIT_UNEXPLAINED


def _described(text: int, found: "Difference") -> dict[str, Any]:
    return {"text": text + 1, **dataclasses.asdict(found), "layer": found.layer, "variant": str(found.variant)}


def _encode(model: "LanguageModel", prompts: Sequence[str], is_chat: bool) -> list[list[int]]:
    if is_chat:
        return [model.encode_chat([{"role": "user", "content": prompt}]) for prompt in prompts]
    return [model.tokenizer.encode(prompt) for prompt in prompts]
