"""Beam searches of transformers and of this library, without text around them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.decoding.batch import Request
from jaxinfer.decoding.beam.batch import BeamBatch
from jaxinfer.decoding.strategies.beam import BeamSearch
from tests.models.hugging_face import forget_lengths


class Text(NamedTuple):
    """One text that a search found: its new tokens, and what it was ranked by."""

    tokens: list[int]
    score: float


class Search(NamedTuple):
    """All texts of a search, best first, and the least gap of log-probabilities that decided what it kept."""

    texts: list[Text]
    margin: float


def search_with_transformers(
    model: Any,
    prompt: Sequence[int],
    strategy: BeamSearch,
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    **options: Any,
) -> Search:
    """Run a search of transformers and return all texts that it kept."""
    import torch

    margins: list[float] = []
    select = model._get_top_k_continuations

    def select_and_measure(**arguments: Any) -> Any:
        scores_C, texts_CS, beams_C = select(**arguments)
        margins.append(_cut_margin(scores_C[0], texts_CS[0, :, arguments["cur_len"]], strategy.width, eos_token_ids))
        return scores_C, texts_CS, beams_C

    forget_lengths(model)
    model._get_top_k_continuations = select_and_measure
    tokens_1T = torch.tensor([list(prompt)])
    try:
        output = model.generate(
            tokens_1T,
            attention_mask=torch.ones_like(tokens_1T),
            do_sample=False,
            num_beams=strategy.width,
            num_return_sequences=strategy.width,
            length_penalty=strategy.length_penalty,
            early_stopping=strategy.early_stopping,
            max_new_tokens=max_new_tokens,
            eos_token_id=list(eos_token_ids) or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    finally:
        del model._get_top_k_continuations
    scores = output.sequences_scores.tolist()
    tokens = [_until_end(ids.tolist()[len(prompt) :], eos_token_ids) for ids in output.sequences]
    texts = [Text(*pair) for pair in zip(tokens, scores)]
    ranks = [
        (better.score - worse.score) * len(worse.tokens) ** strategy.length_penalty for better, worse in pairwise(texts)
    ]
    return Search(texts, min(margins + ranks))


def search(
    lm: LanguageModel,
    prompts: Sequence[Sequence[int]],
    strategy: BeamSearch,
    max_new_tokens: int,
    eos_token_ids: Sequence[int] = (),
    sampling: SamplingParams | None = None,
) -> tuple[list[list[Text]], BeamBatch]:
    """Search all prompts as one batch to its end, and return all texts of each."""
    sampling = sampling or SamplingParams()
    requests = [
        Request(list(prompt), len(prompt) + max_new_tokens, sampling, sample)
        for prompt in prompts
        for sample in range(strategy.width)
    ]
    batch = BeamBatch(lm.programs, lm.params, strategy, requests, eos_token_ids, lm.max_len)
    rows: list[list[int]] = [[] for _ in requests]
    while True:
        for row, news in zip(rows, batch.new_tokens()):
            row += news
        if batch.done:
            break
        batch.advance(5)
    texts = [Text(tokens, batch.score(row)) for row, tokens in enumerate(rows)]
    return [texts[at : at + strategy.width] for at in range(0, len(texts), strategy.width)], batch


def _cut_margin(scores_C: Any, tokens_C: Any, width: int, eos_token_ids: Sequence[int]) -> float:
    """Return how near the candidates come to another choice of those that may end, and of those that run on."""
    scores, tokens = scores_C.tolist(), tokens_C.tolist()
    running = [score for score, token in zip(scores, tokens) if token not in eos_token_ids]
    cuts = [ranked[width - 1] - ranked[width] for ranked in (scores, running) if len(ranked) > width]
    return min(cuts)


def _until_end(tokens: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    ends = [at for at, token in enumerate(tokens) if token in eos_token_ids]
    return tokens[: ends[0] + 1] if ends else tokens
