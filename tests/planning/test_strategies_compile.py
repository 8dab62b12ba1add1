"""Every strategy's step compiles for one v5e chip at Llama-2-7B size, its cache updated where it lies."""

import pytest

from jaxinfer.decoding.draft_model import DraftModel
from jaxinfer.decoding.registry import STRATEGIES, parse_strategy
from jaxinfer.models.decoder import abstract_params
from jaxinfer.ops.backend import choose_backend
from jaxinfer.planning.compile import compile_programs
from tests.planning.models import LLAMA_2_7B, LLAMA_68M

pytestmark = pytest.mark.tpu_compile

DRAFTING = choose_backend("bfloat16", platform="tpu")
CASES = {
    "autoregressive": parse_strategy("autoregressive"),
    "draft_model": DraftModel(
        schedule="bass", config=LLAMA_68M, backend=DRAFTING, weights=abstract_params(LLAMA_68M, DRAFTING)
    ),
    "prompt_lookup": parse_strategy("prompt_lookup"),
    "jacobi": parse_strategy("jacobi"),
    "lookahead": parse_strategy("lookahead:window=7,ngram=5,guesses=7"),
    "layerskip": parse_strategy("layerskip:exit_layer=8"),
}


@pytest.mark.parametrize("strategy", CASES.values(), ids=CASES)
def test_a_step_copies_no_cache(strategy):
    """Temporaries stay under a twentieth of the cache, of which a copy would take half."""
    max_len = -(-(2048 + strategy.headroom) // 16) * 16
    program = compile_programs(LLAMA_2_7B, "v5e:1x1", batch=1, max_len=max_len, tensor=1, strategy=strategy)["decode"]
    assert program.alias_bytes >= program.cache_bytes
    assert program.temporary_bytes < 0.05 * program.cache_bytes


def test_no_strategy_is_left_out():
    assert set(CASES) == set(STRATEGIES)
