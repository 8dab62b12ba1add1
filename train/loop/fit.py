"""A training run: steps, evaluations, checkpoints and metrics; it resumes after any kind of end."""

import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.errors import InvalidCheckpoint, InvalidOption, JaxinferError, WriteFailed
from train.loop.checkpoints import Checkpoints
from train.loop.curves import draw_curves
from train.loop.progress import step_progress
from train.loop.step import Metrics, TrainState

IDENTITY, METRICS, CURVES, CHECKPOINTS = "run.json", "metrics.jsonl", "curves.png", "checkpoints"


class Diverged(JaxinferError, ArithmeticError):
    """The loss is NaN or infinite."""


@dataclass(frozen=True)
class FitSettings:
    """The settings of a run: its folder, its length, and the steps between saves, reports and evaluations.

    ``identity`` is everything that the result depends on; a resumed run must have the same. With ``eval_every`` the
    result is the best parameters by `Evaluate`, and the run ends after ``patience`` evaluations without improvement.
    """

    folder: Path
    num_steps: int
    save_every: int = 200
    keep: int = 2
    log_every: int = 10
    eval_every: int = 0
    patience: int = 0
    identity: Mapping[str, Any] = field(default_factory=dict)


class FitState(NamedTuple):
    """The content of a checkpoint: the training state, the best parameters (none without evaluation), their score."""

    train: TrainState
    best: Any
    best_score: Any
    best_step: Any


@dataclass(frozen=True)
class FitResult:
    """The result of a run; ``score`` is the best evaluation's, None without evaluation."""

    params: Any
    steps: int
    best_step: int
    score: float | None
    interrupted: bool = False


# parameters -> figures; the highest "score" is best
Evaluate = Callable[[Any], Mapping[str, Any]]
Step = Callable[[TrainState, Any, Any], tuple[TrainState, Metrics]]


def fit(
    step: Step,
    state: TrainState,
    frozen: Any,
    batch_at: Callable[[int], Any],
    settings: FitSettings,
    evaluate: Evaluate | None = None,
) -> FitResult:
    """Train to the last step, from the folder's last checkpoint if there is one.

    ``batch_at`` returns a step's batch, which depends only on the step's number. Ctrl-C saves and stops.
    """
    claim_folder(settings.folder, settings.identity)
    evaluates = evaluate is not None and settings.eval_every > 0
    best = jax.tree.map(jnp.copy, state.params) if evaluates else ()
    fit_state = FitState(state, best, jnp.float32(-math.inf), jnp.int32(0))
    checkpoints = Checkpoints(settings.folder / CHECKPOINTS, settings.keep)
    try:
        if checkpoints.latest() is not None:
            fit_state = checkpoints.restore(fit_state)
        first = int(fit_state.train.step)
        record = MetricsRecord(settings.folder / METRICS, first)
        with _noticed_interrupt() as interrupted, step_progress("train", settings.num_steps, first) as report:
            running = _Run(step, frozen, batch_at, settings, evaluate if evaluates else None, checkpoints, record)
            fit_state = running.go(fit_state, interrupted, report)
        checkpoints.wait()
    finally:
        checkpoints.close()
    done, best_step = int(fit_state.train.step), int(fit_state.best_step)
    params = fit_state.best if evaluates and best_step else fit_state.train.params
    score = float(fit_state.best_score) if best_step else None
    return FitResult(params, done, best_step or done, score, bool(interrupted))


def fit_and_draw(
    title: str,
    step: Step,
    state: TrainState,
    frozen: Any,
    batch_at: Callable[[int], Any],
    settings: FitSettings,
    evaluate: Evaluate,
) -> FitResult:
    """Run `fit`, draw the curves of its metrics, and say how to resume an interrupted run."""
    result = fit(step, state, frozen, batch_at, settings, evaluate)
    draw_curves(read_metrics(settings.folder / METRICS), settings.folder / CURVES, title)
    if result.interrupted:
        where = f"saved at step {result.steps}; the same command goes on from there"
        print(f"{settings.folder}: {where}", file=sys.stderr)
    return result


@dataclass
class _Run:
    step: Step
    frozen: Any
    batch_at: Callable[[int], Any]
    settings: FitSettings
    evaluate: Evaluate | None
    checkpoints: Checkpoints
    record: "MetricsRecord"

    def go(self, state: FitState, interrupted: list[int], report: Callable[[int, str], None]) -> FitState:
        settings = self.settings
        at = saved = int(state.train.step)
        pending: list[Metrics] = []
        began = time.perf_counter()
        while at < settings.num_steps and not interrupted and not self._is_exhausted(state, at):
            train, metrics = self.step(state.train, self.frozen, self.batch_at(at))
            state, at = state._replace(train=train), at + 1
            pending.append(metrics)
            is_last = at == settings.num_steps
            if at % settings.log_every == 0 or is_last:
                now = time.perf_counter()
                report(at, self._log(at, pending, now - began))
                pending, began = [], now
            if self.evaluate is not None and (at % settings.eval_every == 0 or is_last):
                state = self._judge(state, at)
                began = time.perf_counter()
            if at % settings.save_every == 0:
                self._refuse_nan(at, metrics)
                self.checkpoints.save(at, state)
                saved = at
        if at > saved:
            self.checkpoints.save(at, state)
        return state

    def _refuse_nan(self, at: int, metrics: Metrics) -> None:
        """Raise Diverged before a useless checkpoint replaces a good one."""
        loss = float(metrics.loss)
        if not (math.isfinite(loss) and math.isfinite(float(metrics.gradient_norm))):
            raise Diverged(
                f"the loss is {loss} at step {at}: take a lower --learning-rate in another --out, or look at the data"
            )

    def _is_exhausted(self, state: FitState, at: int) -> bool:
        patience = self.settings.patience * self.settings.eval_every
        return self.evaluate is not None and patience > 0 and at - int(state.best_step) >= patience

    def _log(self, at: int, pending: list[Metrics], seconds: float) -> str:
        values: list[Metrics] = jax.device_get(pending)
        num_tokens = sum(float(one.num_tokens) for one in values)
        loss = sum(float(one.loss) * float(one.num_tokens) for one in values) / max(num_tokens, 1)
        if not math.isfinite(loss):
            raise Diverged(
                f"the loss is {loss} at step {at}: take a lower --learning-rate in another --out, or look at the data"
            )
        others = {name: sum(float(one.others[name]) for one in values) / len(values) for name in values[0].others}
        norm = sum(float(one.gradient_norm) for one in values) / len(values)
        speed = num_tokens / seconds
        self.record.write(
            {"step": at, "loss": loss, "gradient_norm": norm, "tokens_per_second": round(speed, 1), **others}
        )
        return f"loss {loss:.3f}  {speed:,.0f} tokens/s"

    def _judge(self, state: FitState, at: int) -> FitState:
        assert self.evaluate is not None
        figures = self.evaluate(state.train.params)
        self.record.write({"step": at, "evaluation": figures})
        if figures["score"] <= float(state.best_score):
            return state
        best = jax.tree.map(jnp.copy, state.train.params)
        return state._replace(best=best, best_score=jnp.float32(figures["score"]), best_step=jnp.int32(at))


def claim_folder(folder: Path, identity: Mapping[str, Any]) -> None:
    """Create a run's folder; raise an error if it holds another run."""
    wanted = json.loads(json.dumps(dict(identity)))
    path = folder / IDENTITY
    if path.is_file():
        try:
            found = json.loads(path.read_bytes())
        except ValueError:
            raise InvalidCheckpoint(f"{path}: broken JSON; remove the folder, or give another --out") from None
        names = sorted(found.keys() | wanted.keys())
        if differing := [name for name in names if found.get(name) != wanted.get(name)]:
            name = differing[0]
            raise InvalidCheckpoint(
                f"{folder}: holds a run with {name} {found.get(name)!r:.60}, not {wanted.get(name)!r:.60}; "
                "give another --out"
            )
        return
    staging = path.with_suffix(".partial")
    if folder.exists() and (not folder.is_dir() or any(one != staging for one in folder.iterdir())):
        raise InvalidOption(f"{folder}: exists and holds no run; give another --out")
    folder.mkdir(parents=True, exist_ok=True)
    staging.write_text(json.dumps(wanted, indent=2) + "\n")
    staging.rename(path)


class MetricsRecord:
    """A file of metrics, one JSON object per line; lines after the step where a run resumes are dropped."""

    def __init__(self, path: Path, resumed_at: int) -> None:
        self._path = path
        kept = [line for line in read_metrics(path) if line["step"] <= resumed_at]
        staging = path.with_suffix(".partial")
        staging.write_text("".join(json.dumps(line) + "\n" for line in kept))
        staging.rename(path)

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line."""
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise WriteFailed(f"{self._path}: {error.strerror}; the last whole checkpoint is intact") from None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return a record's lines, without an incomplete one left by a killed process."""
    lines = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


@contextmanager
def _noticed_interrupt() -> Iterator[list[int]]:
    """Yield a list to which Ctrl-C adds, so that the current step completes; a second Ctrl-C stops at once."""
    noticed: list[int] = []

    def notice(number: int, frame: Any) -> None:
        if noticed:
            raise KeyboardInterrupt
        noticed.append(number)
        print("interrupted: saving a checkpoint", file=sys.stderr, flush=True)

    before = signal.signal(signal.SIGINT, notice)
    try:
        yield noticed
    finally:
        signal.signal(signal.SIGINT, before)
