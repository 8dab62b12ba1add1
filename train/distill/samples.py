"""Samples that a student writes for its own training: on-policy data, renewed every few steps (GKD, 2306.13649).

A round of samples is stored in the run's folder. It depends only on the parameters at its first step and on the seed.
So a resumed run finds its current round, and makes the same later rounds as an uninterrupted one.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np

from jaxinfer.errors import InvalidCheckpoint, WriteFailed
from jaxinfer.language_model import LanguageModel
from jaxinfer.notation import Params
from jaxinfer.sampling.params import SamplingParams
from train.distill.loss import DistillBatch
from train.texts.batches import Batch
from train.texts.packing import Example, Order, pack
from train.texts.rows import take_rows


@dataclass(frozen=True)
class SampleSettings:
    """How samples are drawn: ``per_round`` of them every ``every`` steps, packed into rows of ``length``."""

    folder: Path
    every: int
    per_round: int
    max_new_tokens: int
    temperature: float
    length: int
    seed: int


@dataclass
class StudentSamples:
    """The student's own answers to prompts."""

    student: LanguageModel
    prompts: Sequence[tuple[int, ...]]
    settings: SampleSettings
    _round: int = field(default=-1, init=False)
    _rows: Batch | None = field(default=None, init=False)

    def rows_at(self, step: int, params: Params) -> Batch:
        """Return the rows of a step's round; ``params`` write them if the step is the round's first."""
        number = step // self.settings.every
        if self._rows is None or number != self._round:
            self._round, self._rows = number, pack(self._examples(number, params), self.settings.length, number)
        return self._rows

    def _examples(self, number: int, params: Params) -> list[Example]:
        path = self.settings.folder / f"round_{number:05}.jsonl"
        if not path.is_file():
            self._write(path, number, params)
        examples = []
        for line in path.read_text().splitlines():
            try:
                prompt, tokens = (json.loads(line)[name] for name in ("prompt_tokens", "tokens"))
            except (ValueError, KeyError):
                raise InvalidCheckpoint(f"{path}: is damaged; give another --out") from None
            mask = (False,) * len(prompt) + (True,) * len(tokens)
            examples.append(Example((*prompt, *tokens), mask))
        return examples

    def _write(self, path: Path, number: int, params: Params) -> None:
        settings, count = self.settings, self.settings.per_round
        chosen = Order(len(self.prompts), count, settings.seed).at(number)
        prompts = [self.prompts[at] for at in chosen]
        first = settings.seed + number * count
        sampling = [SamplingParams(temperature=settings.temperature, seed=first + at) for at in range(count)]
        # Decoding runs on one device, even if the student is trained on a mesh.
        self.student.params = jax.device_put(params, jax.devices()[0])
        results = self.student.generate(prompts, max_new_tokens=settings.max_new_tokens, sampling=sampling)
        lines = [
            json.dumps({"prompt_tokens": prompt, "tokens": list(result.tokens)[: settings.length - len(prompt)]})
            for prompt, result in zip(prompts, results)
        ]
        try:
            path.parent.mkdir(exist_ok=True)
            staging = path.with_suffix(".partial")
            staging.write_text("".join(f"{line}\n" for line in lines))
            staging.rename(path)
        except OSError as error:
            raise WriteFailed(f"{path}: {error.strerror}; the last whole checkpoint is intact") from None


@dataclass(frozen=True)
class DistillSource:
    """Batches of rows: each row is a sample of the student with probability ``on_policy``, else a row of given texts.

    A batch depends only on the step and, through the samples, on the student's parameters at the start of the round.
    """

    fixed: Batch
    order: Order
    seed: int
    on_policy: float = 0.0
    samples: StudentSamples | None = None

    def batch_at(self, step: int, params: Params) -> DistillBatch:
        """Return a step's batch."""
        places = self.order.at(step)
        texts, is_sampled_B = take_rows(self.fixed, places), np.zeros(len(places), bool)
        if self.samples is None:
            return DistillBatch(texts, is_sampled_B)
        rng = np.random.default_rng((self.seed, step))
        is_sampled_B = rng.random(len(places)) < self.on_policy
        own = self.samples.rows_at(step, params)
        count = len(own.tokens_BT)
        chosen = rng.choice(count, len(places), replace=count < len(places))
        texts = jax.tree.map(
            lambda given, drawn: np.where(is_sampled_B[:, None], drawn, given), texts, take_rows(own, chosen)
        )
        return DistillBatch(texts, is_sampled_B)
