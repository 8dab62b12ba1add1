"""What strategies write on a model whose weights were rounded: drafters are fitted to the model that it was made of."""

from collections.abc import Sequence

import numpy as np

from jaxinfer import LanguageModel
from jaxinfer.decoding.batch import Request
from tests.decoding.rows import Row, run
from tests.decoding.strategy_cases import CASES


def check_texts(
    family: str, plain: LanguageModel, lm: LanguageModel, requests: Sequence[Request], expected: list[Row], name: str
) -> None:
    """Check that a strategy writes what plain decoding on the same weights wrote, in every bit, by drafts too."""
    texts = [[*one.prompt, *row.tokens] for one, row in zip(requests, expected)]
    strategy = CASES[name].strategy(family, plain, texts)
    found = run(lm, requests, strategy)
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        assert np.asarray(one.logprobs, np.float32).tobytes() == np.asarray(other.logprobs, np.float32).tobytes()
    assert not strategy.max_depth or sum(row.counts.accepted for row in found) > 0
