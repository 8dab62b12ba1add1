"""Decode in few bits on one v5e, by the TPU compiler: ``python -m tests.planning.few_bits_table``.

For each model, weights and batch it compiles a step and prints the bytes moved over the floor of the quantized weights
and the cache, the time that memory takes for them, and the cycles of a layer's products, by the compiler's schedule, as
a share of the time of their bytes; a dash where these follow from what is known on the chip alone. A row takes minutes.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoint.few_bits import parse_few_bits
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.few_bits.columns import layer_of, maybe_by_columns
from jaxinfer.ops.few_bits.formats import Format
from jaxinfer.ops.few_bits.round_to_nearest import round_to_nearest
from jaxinfer.ops.matmul import linear
from jaxinfer.planning.footprint import count_footprint, decode_floor
from jaxinfer.planning.known_models import planned_config
from pallas_kernels.chips import CHIPS
from pallas_kernels.schedule import Compiler, ScheduleError
from tests.planning.test_few_bits import LENGTHS, MODELS, deployed, moved_bytes

WEIGHTS = "int8", "int4:group=64"
CHIP = CHIPS["v5e"]
BACKEND = choose_backend("bfloat16", platform="tpu")


def described(form: Format, outputs: int, width: int) -> Any:
    """Describe a stack of kernels as a TPU holds it."""

    def made(weights: jax.Array) -> Any:
        return maybe_by_columns(round_to_nearest(weights, form), width)

    return jax.eval_shape(made, jax.ShapeDtypeStruct((4, outputs, width), jnp.float32))


def multiply(rows: Any, layer: Any, *parts: Any, form: Format, shape: tuple[int, int]) -> Any:
    """Multiply by one layer's kernel, in place."""
    kernel = jax.tree.unflatten(jax.tree.structure(described(form, *shape)), parts)
    return linear(rows, layer_of(kernel, layer), None, BACKEND)


def product_share(compiler: Compiler, config: Any, form: Format, batch: int) -> float:
    """Return the cycles of a layer's products over the time of their bytes."""
    heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    dim, ffn = config.model_dim, config.ffn_dim
    shapes = [(heads[0], dim), (heads[1], dim), (heads[1], dim), (dim, heads[0]), (ffn, dim), (ffn, dim), (dim, ffn)]
    seconds = bytes_seconds = 0.0
    for shape in shapes:
        rows = jax.ShapeDtypeStruct((batch, 1, shape[1]), jnp.bfloat16)
        given = [rows, np.int32(1).reshape(()), *jax.tree.leaves(described(form, *shape))]
        cycles = compiler.schedule(multiply, given, form=form, shape=shape).cycles
        parts = form.parts(*shape).values()
        seconds += cycles / CHIP.clock_hz
        bytes_seconds += (
            sum(np.prod(size) * np.dtype(dtype).itemsize for size, dtype in parts) / CHIP.device_hbm_bytes_per_second
        )
    return seconds / bytes_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = *MODELS, "smollm2-135m"
    parser.add_argument("model", nargs="?", choices=names, help=f"default: {' and '.join(MODELS)}")
    parser.add_argument("--weights", nargs="+", metavar="W", default=WEIGHTS, help="default: %(default)s")
    options = parser.parse_args()
    print("model | weights | rows x slots | moved / floor | memory's time | cycles of a layer's products")
    with Compiler("v5e") as compiler:
        for model in [options.model] if options.model else MODELS:
            config = MODELS.get(model) or planned_config(model)
            for weights in options.weights:
                few_bits = parse_few_bits(weights)
                assert few_bits is not None
                assert few_bits.form is not None
                for batch in (1, 8, 64):
                    slots = LENGTHS.get((model, batch), 1024)
                    deployment = deployed(config, weights, batch=batch, max_len=slots)
                    moved = moved_bytes(deployment.compile()["decode"])
                    ratio = moved / decode_floor(count_footprint(deployment))
                    try:
                        share = f"{product_share(compiler, config, few_bits.form, batch):.2f}"
                    except ScheduleError:
                        share = "-"
                    found = f"{ratio:.2f} | {1e3 * moved / CHIP.device_hbm_bytes_per_second:.1f} ms | {share}"
                    print(f"{model} | {weights} | {batch} x {slots} | {found}", flush=True)


if __name__ == "__main__":
    main()
