"""A run that depends on all there is: parameters, moments, the order of the data, noise, and the best evaluation.

``python -m tests.train.loop.trial FOLDER SECONDS`` pauses that long before each step.
"""

import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train.command import run_command
from train.loop.fit import FitSettings, fit
from train.loop.step import Schedule, StepSettings, Tally, TrainState, compile_step
from train.texts.packing import Order

DATA = np.random.default_rng(0).standard_normal((12, 8)).astype(np.float32)
FROZEN = np.full((8, 600), 0.3, np.float32)
NUM_STEPS = 24
OPTIMIZER = Schedule(num_steps=NUM_STEPS, peak_rate=0.1).build_optimizer()


def _loss(params: Any, frozen: Any, batch: Any, key: Any) -> Tally:
    noise = jax.random.normal(key, batch.shape)
    errors = jnp.square(batch @ params["w"] - noise @ frozen)
    return Tally(jnp.sum(errors), jnp.float32(batch.shape[0]))


@cache
def _compiled() -> Any:
    """Return the start and the step, compiled once however often a process runs the trial."""
    draw = jax.jit(lambda: {"w": jax.random.normal(jax.random.key(9), (8, 600)), "idle": jnp.arange(3.0)})
    start = jax.jit(lambda: TrainState(jnp.int32(0), params := draw(), OPTIMIZER.init(params)))
    return start, compile_step(_loss, OPTIMIZER, StepSettings(seed=5))


def trial(folder: Path, before: Callable[[int], None] = lambda step: None) -> int:
    """Run it, or go on with it, as a command would; ``before`` is called before each step."""
    order = Order(len(DATA), 2, seed=4)
    settings = FitSettings(folder, NUM_STEPS, save_every=2, keep=2, log_every=1, eval_every=3, identity={"run": 1})

    def batch_at(step: int) -> Any:
        before(step)
        return DATA[order.at(step)][None]

    def run(options: Any) -> int:
        start, step = _compiled()
        evaluate = lambda params: {"score": float(np.sum(params["w"]))}  # noqa: E731
        result = fit(step, start(), FROZEN, batch_at, settings, evaluate)
        np.savez(folder / "result.npz", best_step=result.best_step, **result.params)
        return 130 if result.interrupted else 0

    return run_command("trial", "", lambda parser: None, run, [])


if __name__ == "__main__":
    sys.exit(trial(Path(sys.argv[1]), lambda step: time.sleep(float(sys.argv[2]))))
