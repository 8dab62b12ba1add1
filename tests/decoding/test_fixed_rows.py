"""With steps of one size, chains have the bits of plain decoding where XLA multiplies; without, they have not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer import LanguageModel, Strategy
from jaxinfer.decoding.batch import prompt_bucket
from jaxinfer.decoding.fixed_rows import filled, step_headroom
from jaxinfer.decoding.registry import parse_strategy
from jaxinfer.decoding.strategies.autoregressive import Autoregressive
from jaxinfer.decoding.strategies.draft_model import DraftModel
from jaxinfer.decoding.trees.tree import chain
from jaxinfer.models.families.registry import family_of
from jaxinfer.ops.backend import choose_backend
from tests.decoding.covered_models import CONFIGS
from tests.decoding.rows import PLAIN, SAMPLINGS, Row, request, run
from tests.decoding.strategy_cases import perturbed
from tests.toys import TINY_LLAMA, random_params

Bits = list[tuple[list[int], bytes]]
Models = Callable[[str, str], LanguageModel]

# Wide enough for XLA to add in another order where a product has another shape. Gemma 2 has a window of 16 tokens.
_LLAMA = replace(TINY_LLAMA, model_dim=64, ffn_dim=192, head_dim=16, vocab_size=64)
_GEMMA_2 = {**CONFIGS["gemma2"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 192, "head_dim": 16}
CONFIG = {"llama": _LLAMA, "gemma2": family_of(_GEMMA_2).translate(_GEMMA_2)}
LENGTHS, LONG, NUM_NEW = (40, 3), (300, 3), 24


@pytest.fixture(scope="module")
def models() -> Models:
    """Return a function that makes each model once; its layers are scanned, so that XLA multiplies."""
    made: dict[tuple[str, str], LanguageModel] = {}

    def get(name: str, dtype: str) -> LanguageModel:
        if (name, dtype) not in made:
            backend = replace(choose_backend(dtype, "cpu", scan_layers=True, exact="bits"), min_matmul_rows=1)
            params = jax.tree.map(lambda leaf: leaf.astype(dtype), random_params(CONFIG[name], 10, scan_layers=True))
            made[name, dtype] = LanguageModel(CONFIG[name], params, backend)
        return made[name, dtype]

    return get


def decode(lm: LanguageModel, strategy: Strategy = PLAIN, lengths: Sequence[int] = LENGTHS) -> list[Row]:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(2, 64, -(-length // 2)).tolist() * 2 for length in lengths]
    return run(lm, [request(prompt, NUM_NEW, one) for prompt, one in zip(prompts, SAMPLINGS)], strategy)


def bits(rows: Sequence[Row]) -> Bits:
    return [(row.tokens, np.asarray(row.logprobs, np.float32).tobytes()) for row in rows]


def made(name: str, lm: LanguageModel) -> Strategy:
    """Return a strategy that drafts a chain."""
    if name == "draft_model":
        weights = perturbed(lm.params, 0.1)
        strategy: Strategy = DraftModel(num_draft_tokens=4, config=lm.config, backend=lm.backend, params=weights)
    else:
        strategy = parse_strategy(name)
    return lm.resolve(strategy)


SPECS = ("prompt_lookup", "layerskip:exit_layer=1", "jacobi", "draft_model")
SPECS += ("triforce:budget=32,chunk=8,window=16",)
# The full product has every family and both dtypes.
WIDE = {("llama", "float32", "layerskip:exit_layer=1")}
POINTS = [
    pytest.param(*point, marks=pytest.mark.slow if point in WIDE else pytest.mark.exhaustive)
    for point in ((name, dtype, spec) for name in CONFIG for dtype in ("float32", "bfloat16") for spec in SPECS)
]


@pytest.fixture(scope="module")
def plain(models: Models) -> Callable[[str, str], Bits]:
    """Return a function that decodes plainly once for each model."""
    done: dict[tuple[str, str], Bits] = {}

    def get(name: str, dtype: str) -> Bits:
        if (name, dtype) not in done:
            done[name, dtype] = bits(decode(models(name, dtype)))
        return done[name, dtype]

    return get


@pytest.mark.parametrize(("name", "dtype", "spec"), POINTS)
def test_a_chain_has_every_bit_of_plain_decoding(models, plain, name, dtype, spec):
    lm = models(name, dtype)
    rows = decode(lm, made(spec, lm))
    assert sum(row.counts.accepted for row in rows) > 0
    assert bits(rows) == plain(name, dtype)


@pytest.mark.slow
def test_a_chain_has_every_bit_after_a_prompt_of_several_chunks(models):
    lm = models("llama", "float32")
    assert bits(decode(lm, made("jacobi", lm), LONG)) == bits(decode(lm, lengths=LONG))


@dataclass(frozen=True)
class Bare(Autoregressive):
    """Plain decoding in steps of one node."""

    @property
    def fills_steps(self) -> bool:
        return False


@pytest.mark.slow
def test_steps_of_another_size_have_other_bits(models, plain):
    """Else the tests above would show nothing. Not in bfloat16: some processors multiply any number of rows alike."""
    assert bits(decode(models("llama", "float32"), Bare())) != plain("llama", "float32")


def test_nodes_that_fill_a_step_are_never_drafts():
    drafts = chain(jnp.array([[5, 6, 7]], jnp.int32), jnp.array([[True, True, False]]))
    tree = filled(drafts, 16)
    assert all(field.shape == (1, 16) for field in tree)
    assert np.asarray(tree.valid_BM)[0].nonzero()[0].tolist() == [0, 1]
    assert np.asarray(tree.acceptable_BM)[0].nonzero()[0].tolist() == [0, 1]
    assert filled(drafts, 3) is drafts


def test_a_step_is_filled_up_to_a_multiple_where_its_bits_are_those_of_plain_decoding():
    fixed, kernels = choose_backend("bfloat16", "tpu", exact="bits"), choose_backend("float32", "cpu", exact="bits")
    for spec, slots in (("autoregressive", 16), ("prompt_lookup", 16), ("prompt_lookup:num_draft_tokens=16", 32)):
        assert step_headroom(parse_strategy(spec), fixed) == slots
        assert step_headroom(parse_strategy(spec), kernels) == parse_strategy(spec).headroom
    for spec in ("streams", "layerskip:verify=rejection", "streams+prompt_lookup"):
        assert not parse_strategy(spec).fills_steps
    assert choose_backend("bfloat16", "tpu").fixed_rows == kernels.fixed_rows == 1


def test_a_prompt_runs_in_chunks_of_one_size_whatever_its_bucket():
    fixed = choose_backend("bfloat16", "tpu", exact="bits")
    assert [prompt_bucket(length, fixed) for length in (1, 256, 257, 1025)] == [256, 256, 512, 2048]
    assert [prompt_bucket(length) for length in (1, 256, 257)] == [16, 256, 512]


def test_load_takes_bits_or_margin(tiny_llama_folder):
    assert jaxinfer.load(tiny_llama_folder(), exact="bits").backend.step_rows == 16
    with pytest.raises(jaxinfer.errors.InvalidOption, match="unknown exactness 'all'; use one of bits, margin"):
        jaxinfer.load(tiny_llama_folder(), exact="all")
