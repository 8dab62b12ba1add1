"""Of every family, and every variant of it, a row has the bits that it has alone: in a batch of 17, and with drafts.

One is in the wide run; all are marked exhaustive, in float32 and in bfloat16.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer import LanguageModel
from jaxinfer.decoding.batch import Request
from jaxinfer.decoding.registry import parse_strategy
from jaxinfer.models.config import shallower
from jaxinfer.models.families.registry import FAMILIES, decoder_config
from jaxinfer.ops.backend import choose_backend
from tests.decoding.rows import SAMPLINGS, Row, request, run
from tests.models.variants import VARIANTS
from tests.toys import random_params

DRAFTER = parse_strategy("prompt_lookup:num_draft_tokens=4,min_ngram=1")
LENGTHS = (100, 66, 97)  # past windows of 16 and the lengths of stretched rotations; one shape
NUM_NEW, COUNT = 8, 17
UNVARIED = {"kimi_k2", "gpt-sw3", "mimo", "llama4", "llava_next", "aya_vision", "cohere2_vision", "idefics3", "smolvlm"}


def asked(count: int) -> list[Request]:
    """Return requests of few tokens, so that the text says what may come next, with every way of sampling."""
    rng = np.random.default_rng(1)
    return [
        request(rng.integers(2, 12, LENGTHS[row % len(LENGTHS)]).tolist(), NUM_NEW, SAMPLINGS[row % len(SAMPLINGS)])
        for row in range(count)
    ]


def texts(rows: Sequence[Row]) -> list[tuple[list[int], bytes]]:
    return [(row.tokens, np.asarray(row.logprobs, np.float32).tobytes()) for row in rows]


def check(name: str, dtype: str, count: int = COUNT, num_layers: int | None = None) -> None:
    variant = VARIANTS[name]
    described: dict[str, Any] = {"model_type": variant.model_type, **variant.sizes, **variant.config}
    config = decoder_config(described)
    config = config if num_layers is None else shallower(config, num_layers)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), random_params(config, seed=3))
    lm = LanguageModel(config, params, choose_backend(dtype, "cpu"), max_len=160)
    assert lm.backend.cpu_kernels
    requests = asked(COUNT)[:count]
    alone = texts([run(lm, [one])[0] for one in requests])
    assert texts(run(lm, requests)) == alone
    drafted = run(lm, requests, DRAFTER)
    assert texts(drafted) == alone
    assert sum(row.counts.drafted for row in drafted) > 0


@pytest.mark.slow
def test_a_row_has_its_own_bits():
    """With an activation that has parameters; a shallow model and few rows."""
    check("apertus", "float32", count=2, num_layers=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_row_has_its_own_bits_in_every_family(name, dtype):
    check(name, dtype)


def test_every_family_has_a_variant():
    """Others differ from one that has in no computation: in their names alone, or by a vision model left out."""
    covered = {variant.model_type for variant in VARIANTS.values()}
    assert FAMILIES.keys() - covered == UNVARIED
