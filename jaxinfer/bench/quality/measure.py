"""Measures perplexity, agreement with the weights as they are, exact answers, size and speed."""

import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxinfer.bench.quality.windows import Window, cut_windows
from jaxinfer.decoding.batch import pad_texts
from jaxinfer.decoding.scoring import text_divergence
from jaxinfer.language_model import LanguageModel
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.text_scores import score_text

# What decoding speed is measured with: after as many tokens of the text, so many new ones, so often.
_PROMPT_TOKENS, _NEW_TOKENS, _TIMES = 16, 64, 3


class Question(NamedTuple):
    """A prompt, as token ids, and its right answers."""

    prompt: Sequence[int]
    references: tuple[str, ...]


@dataclass(frozen=True)
class Work:
    """What is measured: a text's ``tokens``, none for no text, in windows, and the questions of a task."""

    tokens: Sequence[int]
    context: int
    stride: int
    questions: tuple[Question, ...]
    max_new_tokens: int

    @property
    def windows(self) -> list[Window]:
        """The windows of the text."""
        return cut_windows(len(self.tokens), self.context, self.stride) if len(self.tokens) else []


@dataclass(frozen=True)
class Quality:
    """What one form of the weights gives; the first of a report is of the weights as they are.

    ``num_bytes`` are all parameters'. ``divergence`` is the mean of ``KL(as they are || these)`` over the scored
    tokens, in nats, and ``agreement`` the share of them where the same token is the most probable one.
    ``exact_matches`` is the share of the questions answered with a reference, word for word. Weights that are measured
    as the floats that their codes stand for have no speed of their own: None.
    """

    weights: str
    num_bytes: int
    perplexity: float | None
    divergence: float | None
    agreement: float | None
    exact_matches: float | None
    decode_tokens_per_second: float | None


@dataclass(frozen=True)
class QualityReport:
    """``scored_tokens`` are the tokens that perplexity is of, ``questions`` the number of them.

    ``complete`` is false if the measurement was cut short.
    """

    model: str
    dtype: str
    device: str
    cores: int
    context: int
    stride: int
    scored_tokens: int
    questions: int
    complete: bool
    results: tuple[Quality, ...]


@contextmanager
def unwatched(name: str, total: int) -> Iterator[Callable[[str], None]]:
    """Watch nothing; see `QualityRun.measure`."""
    yield lambda name: None


class QualityRun:
    """A measurement in progress. It can be reported at any time, for example after an interrupt.

    The weights as they are come first, then each of ``forms``, which ``load_in`` loads one at a time. ``simulated`` has
    those that are measured as the floats that their codes stand for, with the bytes that the codes would take.
    """

    def __init__(
        self,
        as_they_are: LanguageModel,
        forms: Sequence[str],
        load_in: Callable[[str], LanguageModel],
        work: Work,
        simulated: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.as_they_are, self.forms, self.load_in = as_they_are, forms, load_in
        self.work, self.simulated = work, simulated
        self.results: list[Quality] = []

    def measure(self, watch: Callable[[str, int], AbstractContextManager[Callable[[str], None]]] = unwatched) -> None:
        """Measure everything.

        ``watch(name, total)`` gives what is called after each of ``total`` pieces of work on a form; nothing is loaded
        meanwhile.
        """
        self._add("as they are", self.as_they_are, None, watch)
        for form in self.forms:
            self._add(form, self.load_in(form), self.as_they_are, watch)

    def report(self, model: str) -> QualityReport:
        """Sum up what is done, of a model of this name."""
        work, device = self.work, jax.devices()[0]
        return QualityReport(
            model=model,
            dtype=str(self.as_they_are.backend.compute_dtype),
            device=device.device_kind,
            cores=os.cpu_count() or 1,
            context=work.context,
            stride=work.stride,
            scored_tokens=sum(window.end - window.first for window in work.windows),
            questions=len(work.questions),
            complete=len(self.results) == 1 + len(self.forms),
            results=tuple(self.results),
        )

    def _add(self, name: str, lm: LanguageModel, reference: LanguageModel | None, watch: Callable[..., Any]) -> None:
        num_bytes, work = self.simulated.get(name), self.work
        with watch(name, len(work.windows) + len(work.questions) + (num_bytes is None)) as advance:
            self.results.append(_measure(name, lm, reference, work, num_bytes, advance))


def _measure(
    name: str,
    lm: LanguageModel,
    reference: LanguageModel | None,
    work: Work,
    simulated_bytes: int | None,
    advance: Callable[[str], None],
) -> Quality:
    logprobs: list[float] = []
    divergences: list[float] = []
    same: list[bool] = []
    for window in work.windows:
        ids = work.tokens[window.begin : window.end]
        scored = slice(window.first - window.begin - 1, len(ids) - 1)
        if reference is None:
            logprobs += score_text(lm, ids).logprobs[scored]
        else:
            found = _compare(reference, lm, ids)
            for kept, values in zip((logprobs, divergences, same), found):
                kept += values[scored].tolist()
        advance(name)
    matches = []
    for prompt, references in work.questions:
        (answer,) = lm.generate([prompt], max_new_tokens=work.max_new_tokens, sampling=SamplingParams(temperature=0))
        matches.append(answer.text.strip() in references)
        advance(name)
    speed, num_bytes = None, simulated_bytes
    if num_bytes is None:
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params))
        speed = _decoding_speed(lm, work.tokens[:_PROMPT_TOKENS] or work.questions[0].prompt)
        advance(name)
    return Quality(
        weights=name,
        num_bytes=num_bytes,
        perplexity=math.exp(-statistics.fmean(logprobs)) if logprobs else None,
        divergence=statistics.fmean(divergences) if divergences else None,
        agreement=statistics.fmean(same) if same else None,
        exact_matches=statistics.fmean(matches) if matches else None,
        decode_tokens_per_second=speed,
    )


def _compare(reference: LanguageModel, lm: LanguageModel, ids: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Return what `text_divergence` does for one text, without its last token."""
    decoders = reference.programs.decoder, lm.programs.decoder
    program, params = partial(text_divergence, decoders), (reference.params, lm.params)
    texts = pad_texts([ids], lm.programs.decoder.backend)
    found = lm.programs.run("text_divergence", program, (), params, *texts)
    return tuple(np.asarray(part)[0] for part in found)


def _decoding_speed(lm: LanguageModel, prompt: Sequence[int]) -> float:
    """Return the tokens a second of plain decoding, one text at a time: the median of three, after one to compile."""
    new = min(_NEW_TOKENS, lm.max_len - len(prompt))
    sampling = SamplingParams(temperature=0, ignore_eos=True)
    runs = [lm.generate([prompt], max_new_tokens=new, sampling=sampling)[0] for _ in range(1 + _TIMES)]
    return statistics.median(run.stats.tokens_per_second for run in runs[1:])
