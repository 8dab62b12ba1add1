"""What grammars, pages and rows add to a step, what sparse weights save, and what a product by panels takes:
``python -m tests.bench.step_costs panels``.

The default model, in bfloat16 unless another dtype is named: batches side by side that take turns, a few steps each. It
prints the median time of a step and, for each batch, the median of its ratios to the first one's step of the same turn.
``panels`` does so with products of one matrix alone.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxinfer
from jaxinfer import Grammar, SamplingParams
from jaxinfer.checkpoint.few_bits import parse_few_bits
from jaxinfer.decoding.batch import RunningBatch
from jaxinfer.language_model import LanguageModel
from jaxinfer.models.few_bits import drafting_matrix, laid_out_matrix
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.few_bits.round_to_nearest import round_to_nearest
from jaxinfer.ops.matmul import product

PROMPTS = (
    "The city of Paris is known for", "List the large cities of Europe as JSON:", "def fibonacci(n):",
    "Once upon a time", "The river Rhine flows", "In 1492, Columbus", "The three laws are", "To bake bread you need",
)  # fmt: skip
CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "year": {"type": "integer"},
        "big": {"type": "boolean"},
    },
    "required": ["name", "year", "big"],
}
SCHEMA = {"type": "array", "minItems": 6, "items": CITY}
# Steps of a turn, steps before the first, and the most turns' tokens.
STEPS, BEFORE, MOST = 6, 4, 240
# The output matrix of the default model's heads, and how many products of it are timed at once.
MATRIX, PRODUCTS = (16384, 576), 20


# Of a product by panels.
FORMS = "int4:group=32", "int4:group=128", "int8", "nf4:group=64"


def start(lm: LanguageModel, strategy: str, prompts: Sequence[object], sampling: SamplingParams) -> RunningBatch:
    """Start a batch that no token ends, and run its first steps, which compile."""
    resolved = lm.resolve(strategy)
    asked = lm._requests(list(prompts), MOST, sampling, resolved)
    batch = RunningBatch(lm.programs, lm.params, resolved, [one.request for one in asked], (), lm.max_len, len(asked))
    batch.advance(BEFORE)
    batch.counts(0)
    return batch


def seconds(batch: RunningBatch, steps: int) -> float:
    began = time.perf_counter()
    batch.advance(steps)
    batch.counts(0)
    return (time.perf_counter() - began) / steps


def report(title: str, times: dict[str, list[float]]) -> None:
    first, *_ = times.values()
    for name, each in times.items():
        ratio = statistics.median(np.array(each) / np.array(first))
        print(f"{title} | {name} | {1e3 * statistics.median(each):.2f} ms | {ratio:.3f}", flush=True)


def grammars(strategy: str, temperature: float, turns: int) -> None:
    """Batches are new in each turn: a grammar ends its text."""
    lm = jaxinfer.load(dtype="bfloat16")
    kinds = {"none": None, "anything": Grammar.regex(r"(?s:.)+"), "schema": Grammar.json_schema(SCHEMA)}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(turns + 1):
        for name, grammar in kinds.items():
            batch = start(lm, strategy, PROMPTS, SamplingParams(grammar=grammar, temperature=temperature, seed=1))
            took = seconds(batch, STEPS)
            times[name] += [took] if turn else []
    report(f"{strategy}, temperature {temperature}", times)


def pages(num_tokens: int, rows: int, turns: int) -> None:
    """Texts of one length, on pages and in a dense cache."""
    rng, times = np.random.default_rng(0), {}
    prompts = [rng.integers(100, 40_000, num_tokens - 3 * row).tolist() for row in range(rows)]
    batches = {}
    for cache in ("dense", "paged:page=64"):
        lm = jaxinfer.load(dtype="bfloat16", max_len=num_tokens + 256, cache=cache)
        batches[cache], times[cache] = start(lm, "autoregressive", prompts, SamplingParams(temperature=0)), []
    for turn in range(min(turns, (MOST - BEFORE) // STEPS)):
        for cache in sorted(batches, reverse=turn % 2 == 1):
            times[cache].append(seconds(batches[cache], STEPS))
    report(f"{rows} rows of {num_tokens} tokens", times)


def batches_of(rows: Sequence[int], dtype: str, turns: int) -> None:
    """Batches of so many rows, with short texts."""
    lm = jaxinfer.load(dtype=dtype)
    batches = {
        f"{count} rows": start(lm, "autoregressive", (PROMPTS * count)[:count], SamplingParams(ignore_eos=True))
        for count in rows
    }
    times: dict[str, list[float]] = {name: [] for name in batches}
    for _ in range(min(turns, (MOST - BEFORE) // STEPS)):
        for name, batch in batches.items():
            times[name].append(seconds(batch, STEPS))
    report(dtype, times)


def sparse(rows: int, turns: int) -> None:
    """Weights in bfloat16, all of them and half; which half makes no difference to a step."""
    times: dict[str, list[float]] = {}
    batches: dict[str, RunningBatch] = {}
    for weights in (None, "2:4", "blocks:kept=1/2", "int8"):
        lm, name = jaxinfer.load(dtype="bfloat16", weights=weights), weights or "all"
        batches[name] = start(lm, "autoregressive", PROMPTS[:rows], SamplingParams(ignore_eos=True))
        times[name] = []
    for turn in range(min(turns, (MOST - BEFORE) // STEPS)):
        for name in sorted(batches, reverse=turn % 2 == 1):
            times[name].append(seconds(batches[name], STEPS))
    report(f"{rows} rows", times)
    print(f"{rows} rows | least | " + ", ".join(f"{name} {1e3 * min(each):.2f} ms" for name, each in times.items()))


def panels(weights: str, rows: int, turns: int) -> None:
    """Products of one matrix in few bits: by rows and in panels, with rows as they are, in int8, and for drafts."""
    rng, backend = np.random.default_rng(0), choose_backend("bfloat16", "cpu")
    few_bits = parse_few_bits(weights)
    assert few_bits is not None
    assert few_bits.form is not None
    lying = round_to_nearest(jnp.asarray(rng.standard_normal(MATRIX, np.float32) / 24), few_bits.form)
    in_panels, in_bytes = laid_out_matrix(lying, backend), replace(backend, activations="int8")
    kinds = {"by rows": (lying, backend), "in panels": (in_panels, backend)}
    if few_bits.form.offset is not None:  # bytes are integers
        kinds |= {
            "by rows, rows in int8": (lying, in_bytes),
            "in panels, rows in int8": (in_panels, in_bytes),
            "in panels, for drafts": (drafting_matrix(lying, backend), backend),
        }
    inputs = jnp.asarray(rng.standard_normal((rows, MATRIX[1])), jnp.bfloat16)
    times: dict[str, list[float]] = {name: [] for name in kinds}

    def repeated(inputs: jax.Array, kernel: Any, backend: Any) -> jax.Array:
        def once(_: Any, before: jax.Array) -> jax.Array:
            return before + (product(before, kernel, backend)[:, :1] * 1e-20).astype(before.dtype)

        return jax.lax.fori_loop(0, PRODUCTS, once, inputs)

    programs = {name: jax.jit(partial(repeated, kernel=kernel, backend=own)) for name, (kernel, own) in kinds.items()}
    for turn in range(turns + 1):
        for name, program in programs.items():
            began = time.perf_counter()
            program(inputs).block_until_ready()
            times[name] += [(time.perf_counter() - began) / PRODUCTS] if turn else []
    report(f"{rows} rows", times)
    print(f"{rows} rows | least | " + ", ".join(f"{name} {1e3 * min(each):.3f} ms" for name, each in times.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["grammars", "pages", "rows", "sparse", "panels"])
    parser.add_argument("--turns", type=int, default=14)
    parser.add_argument("--weights", default=FORMS[0], choices=FORMS, help="of panels (default: %(default)s)")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 2, 4, 8, 13], help="of rows and panels (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of rows (default: %(default)s)"
    )
    options = parser.parse_args()
    print("batch | kind | median of a step | ratio")
    if options.what == "grammars":
        for strategy in ("autoregressive", "medusa+prompt_lookup+nodes=8"):
            for temperature in (0.0, 0.8):
                grammars(strategy, temperature, options.turns)
    elif options.what == "sparse":
        for rows in (1, 8):
            sparse(rows, options.turns)
    elif options.what == "rows":
        batches_of(options.rows, options.dtype, options.turns)
    elif options.what == "panels":
        for rows in options.rows:
            panels(options.weights, rows, options.turns)
    else:
        for num_tokens in (512, 4096):
            for rows in (1, 8):
                pages(num_tokens, rows, options.turns)


if __name__ == "__main__":
    main()
