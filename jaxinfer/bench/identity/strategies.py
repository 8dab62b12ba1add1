"""Checks every registered strategy on one model; drafters that the model lacks are made up, untrained."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.bench.identity.audit import NUMERIC_ERROR, audit_texts
from jaxinfer.decoding.registry import STRATEGIES, parse_strategy
from jaxinfer.decoding.strategies.dflash import DFlash
from jaxinfer.decoding.strategies.draft_model import DraftModel
from jaxinfer.decoding.strategies.eagle import Eagle
from jaxinfer.decoding.strategies.medusa import Medusa
from jaxinfer.decoding.strategies.mtp import Mtp
from jaxinfer.decoding.strategies.streams import Streams
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.decoding.trees.static import read_tree
from jaxinfer.errors import JaxinferError
from jaxinfer.language_model import LanguageModel
from jaxinfer.models.drafters.dflash import dflash_for, init_dflash
from jaxinfer.models.drafters.eagle import init_eagle, shape_for
from jaxinfer.models.drafters.mtp import init_mtp
from jaxinfer.models.drafters.streams import StreamsConfig, init_streams
from jaxinfer.sampling.params import SamplingParams

_MEDUSA_HEADS = 3
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8, seed=1)


@dataclass(frozen=True)
class StrategyOutcome:
    """The result of one strategy: of ``texts`` outputs, how many are identical to plain decoding's, or explained.

    Of the identical ones, ``bits_equal`` also have its log-probabilities in every bit.
    ``failure`` says why the strategy does not pass.
    """

    strategy: str
    texts: int = 0
    identical: int = 0
    explained: int = 0
    tokens: int = 0
    steps: int = 0
    accepted: int = 0
    failure: str | None = None
    bits_equal: int = 0

    @property
    def passes(self) -> bool:
        """Tell whether the strategy passes."""
        return self.failure is None

    def line(self) -> str:
        """Return the outcome as one line of text."""
        if self.failure:
            return f"FAILED  {self.strategy}: {self.failure}"
        said = f"ok      {self.strategy}: {self.identical} of {self.texts} texts identical"
        if self.bits_equal:
            said += f", {self.bits_equal} in every bit"
        if self.explained:
            said += f", {self.explained} explained by rounding"
        return f"{said}; {self.tokens} tokens in {self.steps} steps, {self.accepted} drafts accepted"

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""
        return {**asdict(self), "passes": self.passes}


def check_strategies(
    model: LanguageModel,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 48,
    names: Sequence[str] = tuple(STRATEGIES),
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Compare strategies with plain decoding, greedy and sampled; return a report with the key ``passes``.

    If TPU kernels or their interpreter work on the cache, plain decoding is also compared with the kernels' reference.
    An exception counts as a failure of its strategy.
    """
    ids = [model.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    outcomes = []
    for outcome in _outcomes(model, ids, max_new_tokens, names):
        say(outcome.line())
        outcomes.append(outcome)
    return {
        "dtype": str(model.backend.param_dtype),
        "kernels": model.backend.kernels,
        "passes": all(outcome.passes for outcome in outcomes),
        "strategies": [outcome.to_json() for outcome in outcomes],
    }


def make_strategy(name: str, model: LanguageModel) -> Strategy:
    """Return a registered strategy that runs without further files: its heads are untrained, its sizes small."""
    return _MADE_UP[name](model) if name in _MADE_UP else parse_strategy(name)


def _outcomes(
    model: LanguageModel, prompts: list[list[int]], max_new_tokens: int, names: Sequence[str]
) -> Iterator[StrategyOutcome]:
    if model.backend.kernels in ("pallas", "interpret"):
        yield _compare_with_reference(model, prompts, max_new_tokens)
    for name in names:
        try:
            yield _audit(name, model, prompts, max_new_tokens)
        except (JaxinferError, jax.errors.JaxRuntimeError) as problem:
            yield StrategyOutcome(name, failure=f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}")


def _audit(name: str, model: LanguageModel, prompts: list[list[int]], max_new_tokens: int) -> StrategyOutcome:
    # Beam search is not sampled, and one beam is greedy search.
    samplings = (GREEDY,) if name == "beam" else (GREEDY, SAMPLED)
    strategy, tolerance = make_strategy(name, model), dict(NUMERIC_ERROR)[str(model.backend.param_dtype)]
    audits = [
        audit
        for sampling in samplings
        for audit in audit_texts(
            model,
            prompts,
            strategy,
            sampling,
            max_new_tokens=max_new_tokens,
            batch_size=len(prompts),
            tolerance=tolerance,
        )
    ]
    identical = sum(audit.divergence is None for audit in audits)
    failed = [audit for audit in audits if not audit.passes]
    explained = sum(audit.passes and audit.divergence is not None for audit in audits)
    failure = None
    if failed:
        first = failed[0].divergence or f"log-probabilities differ by {failed[0].largest_difference:.1e}"
        failure = f"{len(failed)} of {len(audits)} texts are others, without explanation; the first: {first}"
    return StrategyOutcome(
        name,
        len(audits),
        identical,
        explained,
        sum(audit.new_tokens for audit in audits),
        sum(audit.steps for audit in audits),
        sum(audit.accepted for audit in audits),
        failure,
        sum(audit.bits_equal for audit in audits),
    )


def _compare_with_reference(model: LanguageModel, prompts: list[list[int]], max_new_tokens: int) -> StrategyOutcome:
    """Compare the logits along plain decoding's outputs with the logits of the kernels' reference."""
    name = f"plain decoding, {model.backend.kernels} kernels beside their reference"
    judge = LanguageModel(model.config, model.params, replace(model.backend, kernels="reference"))
    results = model.generate(prompts, max_new_tokens=max_new_tokens)
    texts = [[*prompt, *result.tokens] for prompt, result in zip(prompts, results)]
    ours, theirs = (jnp.asarray(each.logits(texts)) for each in (model, judge))
    lengths_B = jnp.array([len(text) for text in texts])
    is_real_BT1 = (jnp.arange(ours.shape[1]) < lengths_B[:, None])[..., None]
    error = float(jnp.max(jnp.where(is_real_BT1, jnp.abs(ours - theirs), 0)))
    tolerance = dict(NUMERIC_ERROR)[str(model.backend.param_dtype)]
    # Written so that NaN fails too.
    failure = None if error <= tolerance else f"logits differ by {error:.1e}, more than {tolerance:.0e}"
    count = sum(len(result.tokens) for result in results)
    return StrategyOutcome(name, len(texts), len(texts), 0, count, count, 0, failure)


def _target_as_drafter(model: LanguageModel) -> Strategy:
    return DraftModel(num_draft_tokens=4, config=model.config, backend=model.backend, params=model.params)


def _untrained_heads(model: LanguageModel) -> Strategy:
    """Return Medusa with zero heads: they repeat the model's next token, which is wrong except in repetitive text."""
    width, dtype = model.config.model_dim, jnp.dtype(model.backend.param_dtype)
    block = {"kernel": jnp.zeros((width, width), dtype), "bias": jnp.zeros((width,), dtype)}
    heads = tuple({"blocks": (block,)} for _ in range(_MEDUSA_HEADS))
    return Medusa(paths=read_tree("3.2.1"), params={"heads": heads})


def _untrained_streams(model: LanguageModel) -> Strategy:
    described = StreamsConfig(num_streams=3, num_layers=max(1, model.config.num_layers // 4))
    params = init_streams(described, model.config, model.backend, jax.random.key(0))
    return Streams(paths=read_tree("3.2.1"), num_layers=described.num_layers, params=params)


def _untrained_eagle(model: LanguageModel) -> Strategy:
    shape = shape_for(model.config)
    params = init_eagle(shape, model.config.vocab_size, jax.random.key(0), str(model.backend.param_dtype))
    return Eagle(tree="3.2.1", shape=shape, params=params)


def _untrained_dflash(model: LanguageModel) -> Strategy:
    dflash = dflash_for(model.config, block_size=4)
    return DFlash(tree="3.2.1", dflash=dflash, params=init_dflash(dflash, model.backend, 0))


def _drawn(model: LanguageModel) -> Any:
    return jax.jit(lambda key: init_mtp(model.config, model.backend, key))(jax.random.key(0))


def _untrained_mtp(model: LanguageModel) -> Strategy:
    return Mtp(num_draft_tokens=3, params=_drawn(model))


def _small_budget(model: LanguageModel) -> Strategy:
    return parse_strategy("triforce:budget=32,chunk=8,window=16")


def _one_action(model: LanguageModel) -> Strategy:
    # Whatever is searched behind it, the one token to try is the one that plain decoding draws.
    return parse_strategy("mcts:simulations=2,actions=1,depth=2")


def _one_beam(model: LanguageModel) -> Strategy:
    return parse_strategy("beam:width=1")


_MADE_UP: Mapping[str, Callable[[LanguageModel], Strategy]] = MappingProxyType(
    {
        "draft_model": _target_as_drafter,
        "medusa": _untrained_heads,
        "streams": _untrained_streams,
        "eagle": _untrained_eagle,
        "mtp": _untrained_mtp,
        "triforce": _small_budget,
        "dflash": _untrained_dflash,
        "beam": _one_beam,
        "mcts": _one_action,
    }
)
