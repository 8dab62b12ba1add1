"""``jaxinfer bench quality``: perplexity, agreement, exact answers, size and speed by the form of the weights."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from jaxinfer.cli.arguments import whole_number
from jaxinfer.cli.output.progress import byte_progress, count_progress
from jaxinfer.errors import InvalidOption


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bench quality``."""
    parser.add_argument(
        "--model", metavar="M", help="hub id, folder, .gguf file or .bin file (default: smollm2-135m-instruct)"
    )
    parser.add_argument("--revision", metavar="R", help="branch, tag or commit of a hub model")
    parser.add_argument("--dtype", metavar="D", help="float32, bfloat16 or float16 (default: the device's own)")
    parser.add_argument(
        "--weights",
        metavar="W",
        nargs="+",
        default=[],
        help="forms to compare with the weights as they are, such as int8 int4:group=64 gguf",
    )
    parser.add_argument(
        "--method",
        metavar="M",
        choices=["gptq", "rtn"],
        default="rtn",
        help="how int8 and int4 are chosen: rtn, each weight to the nearest, or gptq (default: %(default)s)",
    )
    parser.add_argument(
        "--calibration", metavar="FILE", type=Path, help="text for --method gptq (default: the model writes its own)"
    )
    parser.add_argument("--text", metavar="FILE", type=Path, help="text whose perplexity is measured")
    parser.add_argument("--tokens", metavar="N", type=whole_number(2), help="take the text's first N tokens")
    parser.add_argument(
        "--context",
        metavar="N",
        type=whole_number(2),
        default=1024,
        help="tokens that are read together (default: %(default)s)",
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


def run(options: argparse.Namespace) -> int:
    """Measure and print a table, or one JSON object."""
    if options.text is None and options.task is None:
        raise InvalidOption("nothing to measure: give --text FILE, --task FILE or both")
    if options.chart is not None and options.text is None:
        raise InvalidOption("--chart draws perplexities: give --text FILE too")
    stride = options.context if options.stride is None else options.stride
    if stride > options.context:
        raise InvalidOption(f"--stride {stride} exceeds --context {options.context}: tokens between would not be read")
    if len(set(options.weights)) < len(options.weights):
        raise InvalidOption("--weights: name each form once")
    if options.calibration is not None and options.method == "rtn":
        raise InvalidOption("--calibration is for --method gptq: rounding to the nearest reads no text")
    text = None if options.text is None else read_text(options.text)
    calibration = None if options.calibration is None else read_text(options.calibration, "--calibration")
    asked = () if options.task is None else read_questions(options.task)
    # Imported here: a mistake in the options is told before JAX is waited for.
    from jaxinfer.bench.chart_file import check_chart
    from jaxinfer.bench.quality.chart import draw_quality
    from jaxinfer.bench.quality.measure import Question, Work, measure_quality, num_steps
    from jaxinfer.bench.quality.table import quality_lines
    from jaxinfer.checkpoint.few_bits import parse_few_bits
    from jaxinfer.jax_setup import kept_folder, prepare_jax
    from jaxinfer.language_model import DEFAULT_MODEL, LanguageModel, load
    from jaxinfer.model_quantization import quantize

    parsed = {form: parse_few_bits(form) for form in options.weights}
    if options.chart is not None:
        check_chart(options.chart)
    prepare_jax()
    name = DEFAULT_MODEL if options.model is None else options.model

    def load_in(form: str | None) -> LanguageModel:
        with byte_progress(name.rstrip("/").rpartition("/")[2]) as progress:
            return load(
                name,
                dtype=options.dtype,
                weights=form,
                revision=options.revision,
                kept=kept_folder(),
                notice=lambda line: print(line, file=sys.stderr),
                progress=progress,
            )

    def make_in(form: str) -> LanguageModel:
        few_bits = parsed[form]
        if options.method == "rtn" or few_bits is None or few_bits.form is None:
            return load_in(form)
        ids = None if calibration is None else model.tokenizer.encode(calibration)
        with count_progress(f"{options.method} {form}", model.config.num_layers) as layer_done:
            return quantize(
                model, form, method=options.method, calibration=ids, advance=lambda layer: layer_done(str(layer))
            )

    model = load_in(None)
    tokens = [] if text is None else model.tokenizer.encode(text)[: options.tokens]
    encode = model.tokenizer.encode
    if options.chat:
        encode = lambda prompt: model.encode_chat([{"role": "user", "content": prompt}])  # noqa: E731
    questions = tuple(Question(encode(prompt), references) for prompt, references in asked)
    work = Work(tokens, min(options.context, model.max_len), stride, questions, options.max_new_tokens)
    with count_progress("quality", num_steps(work, 1 + len(options.weights))) as advance:
        report = measure_quality(name, model, options.weights, make_in, work, advance)
    if options.chart is not None:
        draw_quality(report, options.chart)
    print(json.dumps(dataclasses.asdict(report)) if options.json else "\n".join(quality_lines(report)))
    return 0


def read_text(path: Path, option: str = "--text") -> str:
    """Return a file's text; raise InvalidOption if it is no UTF-8 text, or empty."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidOption(f"{option} {path}: not UTF-8 text; convert the file to UTF-8") from None
    if not text.strip():
        raise InvalidOption(f"{option} {path}: the file is empty")
    return text


def read_questions(path: Path) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the prompts of a task with their references; raise InvalidOption naming the line of a mistake."""
    questions = []
    for number, line in enumerate(read_text(path, "--task").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry: Any = json.loads(line)
        except (ValueError, RecursionError):
            raise InvalidOption(f"{path}, line {number}: not JSON; write one JSON object a line") from None
        prompt, references = (entry.get(key) if isinstance(entry, dict) else None for key in ("prompt", "references"))
        listed = [references] if isinstance(references, str) else references
        if not isinstance(prompt, str) or not prompt or not isinstance(listed, list) or not listed:
            raise InvalidOption(f"{path}, line {number}: needs a 'prompt' and 'references', a list of texts")
        if not all(isinstance(one, str) and one.strip() for one in listed):
            raise InvalidOption(f"{path}, line {number}: 'references' are no texts")
        questions.append((prompt, tuple(one.strip() for one in listed)))
    return tuple(questions)
