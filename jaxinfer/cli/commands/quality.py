"""``jaxinfer bench quality``: perplexity, agreement, exact answers, size and speed by the form of the weights."""

import argparse
import dataclasses
import functools
import json
from itertools import product
from pathlib import Path

from jaxinfer.cli.arguments import add_method_arguments, add_model_arguments, whole_number
from jaxinfer.cli.output.progress import count_progress
from jaxinfer.cli.prompts import parse_json, read_calibration, read_text
from jaxinfer.errors import InvalidOption

# Where neither says otherwise.
_CONTEXT = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bench quality``."""
    parser.add_argument(
        "--weights",
        metavar="W",
        nargs="+",
        default=[],
        help="forms to compare with the weights as they are, such as int8 int4:group=64 gguf",
    )
    parser.add_argument(
        "--activations",
        metavar="A",
        help="compare each of these also with what it multiplies rounded to bytes, int8; without --weights, the model",
    )
    parser.add_argument(
        "--caches",
        metavar="C",
        nargs="+",
        default=[],
        help="with the weights as they are, KV caches to compare with a wide one: int8 fp8",
    )
    parser.add_argument(
        "--bits",
        metavar="N",
        nargs="+",
        type=int,
        choices=range(2, 9),
        default=[],
        help="2 to 8: round kernels to so many bits, as floats, to see what that costs in quality",
    )
    parser.add_argument(
        "--groups",
        metavar="N",
        nargs="+",
        type=int,
        choices=(32, 64, 128),
        default=[],
        help="for --bits: the weights that share a scale and a minimum, 32, 64 or 128 (default: 64)",
    )
    add_method_arguments(parser)
    parser.add_argument("--text", metavar="FILE", type=Path, help="text whose perplexity is measured")
    parser.add_argument("--tokens", metavar="N", type=whole_number(2), help="take the text's first N tokens")
    parser.add_argument(
        "--context",
        metavar="N",
        type=whole_number(2),
        help=f"tokens that are read together (default: {_CONTEXT}, or what the model reads)",
    )
    parser.add_argument(
        "--stride",
        metavar="N",
        type=whole_number(1),
        help="tokens from one window to the next; each token is scored once (default: the context)",
    )
    parser.add_argument(
        "--task",
        metavar="FILE",
        type=Path,
        help="JSONL file of questions: each line has 'prompt' and 'references', a list of right answers",
    )
    parser.add_argument("--chat", action="store_true", help="put each question into the model's chat template")
    parser.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=whole_number(1),
        default=64,
        help="for each answer (default: %(default)s)",
    )
    parser.add_argument("--chart", metavar="FILE", type=Path, help="draw a chart to a .png or .svg file")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    add_model_arguments(parser, has_weights=False)


def check_options(options: argparse.Namespace) -> None:
    """Raise InvalidOption for options that contradict each other."""
    if options.text is None and options.task is None:
        raise InvalidOption("nothing to measure: give --text FILE, --task FILE or both")
    if options.cache.partition(":")[0] not in ("dense", "paged"):
        raise InvalidOption(f"--cache {options.cache}: quality is measured with the dense cache: leave it out")
    if options.chart is not None and options.text is None:
        raise InvalidOption("--chart draws perplexities: give --text FILE too")
    context = options.context or _CONTEXT
    if options.stride is not None and options.stride > context:
        raise InvalidOption(f"--stride {options.stride} exceeds --context {context}: tokens between would not be read")
    if len(set(options.weights)) < len(options.weights):
        raise InvalidOption("--weights: name each form once")
    if len(set(options.caches)) < len(options.caches):
        raise InvalidOption("--caches: name each dtype once")
    if len(set(options.bits)) < len(options.bits) or len(set(options.groups)) < len(options.groups):
        raise InvalidOption("--bits and --groups: name each number once")
    if options.groups and not options.bits:
        raise InvalidOption("--groups are those of --bits: give --bits too")


def run(options: argparse.Namespace) -> int:
    """Measure and print a table, or one JSON object."""
    check_options(options)
    calibration = read_calibration(options)
    text = None if options.text is None else read_text("--text", options.text)
    asked = () if options.task is None else read_questions(options.task)
    # Imported here: a mistake in the options is told before JAX is waited for.
    from jaxinfer.bench.chart_file import check_chart
    from jaxinfer.bench.quality.bit_widths import BitWidth
    from jaxinfer.bench.quality.chart import draw_quality
    from jaxinfer.bench.quality.measure import QualityRun, Question, Work
    from jaxinfer.bench.quality.table import quality_lines
    from jaxinfer.bench.quality.weights import check_weights
    from jaxinfer.checkpoint.few_bits import parse_few_bits
    from jaxinfer.cli.loading import load_model
    from jaxinfer.language_model import LanguageModel
    from jaxinfer.model_loading import DEFAULT_MODEL
    from jaxinfer.model_params import check_form, check_kernels
    from jaxinfer.model_quantization import form_of, quantize, with_activations
    from jaxinfer.ops.backend import check_activations, check_cache_dtype

    parsed = [parse_few_bits(form) for form in options.weights]
    by_method = [each.name for each in parsed if each and each.form is not None] if options.method != "rtn" else []
    if options.method != "rtn" and not by_method:
        raise InvalidOption(f"--method {options.method} chooses weights: give --weights int8, int4:group=64 or 2:4")
    for form in by_method:
        form_of(form, options.method)
    check_activations(options.activations)
    for few_bits in parsed:
        check_form(few_bits, options.activations)
    if options.chart is not None:
        check_chart(options.chart)

    for name in options.caches:
        check_cache_dtype(name, options.dtype or "", "cpu")
    caches = {f"cache in {name}": name for name in options.caches}
    widths = {each.name: each for each in (BitWidth(*pair) for pair in product(options.bits, options.groups or [64]))}
    # A row of the table: the form of the weights, and what they multiply.
    rows: dict[str, tuple[str | None, str | None]] = {}
    for form in options.weights or [None]:
        if form is not None:
            rows[form] = form, None
        if options.activations is not None:
            name = f"activations in {options.activations}"
            rows[name if form is None else f"{form}, {name}"] = form, options.activations

    def load_in(**own: str | None) -> LanguageModel:
        given = {**vars(options), "weights": None, "activations": None, **own}
        return load_model(argparse.Namespace(**given))

    @functools.lru_cache(maxsize=1)
    def quantized(form: str) -> LanguageModel:
        ids = None if calibration is None else model.tokenizer.encode(calibration)
        with count_progress(f"{options.method} {form}", model.config.num_layers) as layer_done:
            return quantize(
                model, form, method=options.method, calibration=ids, advance=lambda layer: layer_done(str(layer))
            )

    def make_in(row: str) -> LanguageModel:
        if row in caches:
            return load_in(cache_dtype=caches[row])
        if row in widths:
            return widths[row].round(model)
        form, activations = rows[row]
        if form in by_method:
            return with_activations(quantized(form), activations)
        return load_in(weights=form, activations=activations)

    model = load_in()
    if not options.weights:
        check_kernels(model.params, options.activations)
    for width in widths.values():
        width.check(model.params)
    for few_bits in filter(None, parsed):
        check_weights(few_bits, model)
    if options.context is not None and options.context > model.max_len:
        raise InvalidOption(f"--context {options.context}: the model reads {model.max_len} tokens at most")
    tokens = [] if text is None else model.tokenizer.encode(text)[: options.tokens]

    def encode(prompt: str) -> list[int]:
        is_chat = options.chat
        return model.encode_chat([{"role": "user", "content": prompt}]) if is_chat else model.tokenizer.encode(prompt)

    questions = tuple(Question(encode(prompt), references) for prompt, references in asked)
    context = min(options.context or _CONTEXT, model.max_len)
    work = Work(tokens, context, min(options.stride or context, context), questions, options.max_new_tokens)
    simulated = {name: width.num_bytes(model.params) for name, width in widths.items()}
    running = QualityRun(model, [*rows, *caches, *widths], make_in, work, simulated)
    try:
        running.measure(count_progress)
    finally:
        report = running.report(options.model or DEFAULT_MODEL)
        if report.results:
            if options.chart is not None:
                draw_quality(report, options.chart)
            print(json.dumps(dataclasses.asdict(report)) if options.json else "\n".join(quality_lines(report)))
    return 0


def read_questions(path: Path) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the prompts of a task with their references; raise InvalidOption naming the line of a mistake."""
    questions = []
    # Texts may have other ends of lines, which JSON does not escape.
    for number, line in enumerate(read_text("--task", path).split("\n"), 1):
        if not line.strip():
            continue
        entry = parse_json(f"{path}, line {number}", line)
        prompt, references = (entry.get(key) if isinstance(entry, dict) else None for key in ("prompt", "references"))
        listed = [references] if isinstance(references, str) else references
        if not isinstance(prompt, str) or not prompt or not isinstance(listed, list) or not listed:
            raise InvalidOption(f"{path}, line {number}: needs a 'prompt' and 'references', a list of texts")
        if not all(isinstance(one, str) and one.strip() for one in listed):
            raise InvalidOption(f"{path}, line {number}: 'references' are no texts")
        questions.append((prompt, tuple(one.strip() for one in listed)))
    return tuple(questions)
