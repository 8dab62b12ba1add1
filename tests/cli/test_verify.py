"""``jaxinfer verify`` passes what is identical or explained by rounding, and nothing else."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest

from jaxinfer import SamplingParams
from jaxinfer.bench.identity.audit import explain, retell_text
from jaxinfer.cli import loading
from jaxinfer.cli.sample_prompts import SAMPLE_PROMPTS
from jaxinfer.decoding import registry
from jaxinfer.decoding.strategies.prompt_lookup import PromptLookup
from jaxinfer.language_model import LanguageModel
from tests.cli.conftest import Outcome
from tests.decoding.rows import SAMPLINGS
from tests.toys import TINY_LLAMA, encode_bytes, float32_backend, random_params

Run = Callable[..., Outcome]
PROMPT = encode_bytes("The quick fox")
SHORT = ("--max-new-tokens", "24")


@pytest.fixture
def model(trained_model: LanguageModel) -> LanguageModel:
    return trained_model


@pytest.fixture
def verify(run: Run, model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(loading, "load_model", lambda options: model)
    return lambda *arguments: run("verify", *arguments, *SHORT)


@dataclass(frozen=True)
class Gullible(PromptLookup):
    """Take every draft, whatever the target says, and claim what one is told to."""

    name: ClassVar[str] = "gullible"

    claim: str = field(default="lossy", compare=False)

    @property
    def exactness(self) -> str:
        return self.claim

    @property
    def acceptance(self) -> str:
        return "typical"

    @property
    def typical_thresholds(self) -> tuple[float, float]:
        return 0.0, 0.0


@pytest.mark.slow
def test_an_identical_strategy_passes_on_prompts_that_nobody_gave(verify: Run) -> None:
    outcome = verify("--strategy", "prompt_lookup", "--temperature", "0.5", "--seed", "3")
    lines = outcome.out.splitlines()
    assert (outcome.code, outcome.err) == (0, "")
    assert len(lines) == len(SAMPLE_PROMPTS) + 1
    assert all(line.endswith("identical") for line in lines[:-1])
    assert lines[-1].startswith(f"verdict: passed: {len(SAMPLE_PROMPTS)} of {len(SAMPLE_PROMPTS)} texts identical")


def test_a_strategy_that_changes_tokens_fails(verify: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that promises to change none has failed; of one that does not, the same is said with its promise."""
    monkeypatch.setattr(registry, "STRATEGIES", {**registry.STRATEGIES, "gullible": Gullible})
    repeated = "A small otter found the moon.\nA small"
    arguments = (repeated, "--temperature", "2", "--strategy")
    outcome = verify(*arguments, "gullible:claim=identical")
    assert outcome.code == 1
    assert "NOT EXPLAINED: at token " in outcome.out
    assert "beyond 0.0001" in outcome.out
    assert outcome.out.splitlines()[-1].startswith("verdict: failed: 0 of 1 texts identical")

    found = json.loads(verify(*arguments, "gullible:claim=identical", "--json").out)
    (text,) = found["texts"]
    assert (found["passes"], found["unexplained"], text["prompt"]) == (False, 1, repeated)
    assert text["divergence"]["margin"] > found["tolerance"] == 1e-4
    assert text["divergence"]["plain_token"] != text["divergence"]["strategy_token"]

    for claim, reason in (("lossy", "lossy by design"), ("distribution", "keeps their distribution")):
        outcome = verify(*arguments, f"gullible:claim={claim}")
        assert outcome.code == 1
        *_, said, verdict = outcome.out.splitlines()
        assert "does not promise the tokens of plain decoding" in said
        assert reason in said
        assert verdict.startswith("verdict: differs: 0 of 1")


def test_an_audit_without_accepted_drafts_says_that_it_says_little(verify: Run) -> None:
    outcome = verify("x", "--strategy", "autoregressive")
    assert outcome.code == 0
    assert "this audit says little" in outcome.out


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
def test_the_oracle_draws_plain_decodings_own_text_again(model: LanguageModel, sampling: SamplingParams) -> None:
    """One pass over the whole text gives every token, with penalties and lengths counted as they were then."""
    tokens = model.generate([PROMPT], max_new_tokens=24, sampling=sampling)[0].tokens
    rival = 2 if tokens[5] != 2 else 3
    draws, margins = retell_text(model, PROMPT, tokens, 5, rival, sampling)
    assert len(tokens) > 5
    assert draws.tolist() == list(tokens)
    assert margins[5] > 1e-4
    if not (sampling.top_k or sampling.top_p < 1):
        assert (np.delete(margins, 5) == 0).all()


@pytest.fixture(scope="module")
def tied() -> tuple[LanguageModel, tuple[int, ...], int, int]:
    """Return a model for which a token is another's twin, its text, where the token stands there, and the twin."""
    params, backend = random_params(TINY_LLAMA), float32_backend()
    tokens = LanguageModel(TINY_LLAMA, params, backend).generate([PROMPT], max_new_tokens=20)[0].tokens
    position = next(at for at in range(4, 15) if tokens[at] < 255)
    # Not among the last two of 258: a product may add up what is left over from whole vectors in another order.
    twin = next(token for token in range(255, tokens[position], -1) if token not in tokens)
    embed = params["embed"]["embedding"]
    params["embed"]["embedding"] = embed.at[twin].set(embed[tokens[position]])
    if "head" in params:
        kernel = params["head"]["kernel"]
        params["head"]["kernel"] = kernel.at[twin].set(kernel[tokens[position]])
    model = LanguageModel(TINY_LLAMA, params, backend)
    assert model.generate([PROMPT], max_new_tokens=20)[0].tokens == tokens
    return model, tokens, position, twin


def test_a_tie_explains_a_divergence_and_what_follows_from_it(tied: tuple) -> None:
    model, plain, position, twin = tied
    found = (*plain[:position], twin, *plain[position + 1 :])
    divergence = explain(model, PROMPT, plain, found, SamplingParams(), 1e-4)
    assert divergence is not None
    assert (divergence.position, divergence.plain_token, divergence.strategy_token) == (position, plain[position], twin)
    assert divergence.margin == pytest.approx(0, abs=1e-5)
    assert divergence.is_explained
    assert explain(model, PROMPT, plain, plain, SamplingParams(), 1e-4) is None


def test_a_tie_explains_neither_a_later_mistake_nor_another_token(tied: tuple) -> None:
    model, plain, position, twin = tied
    late = (*plain[:position], twin, *plain[position + 1 : -1], plain[-1] ^ 1)
    divergence = explain(model, PROMPT, plain, late, SamplingParams(), 1e-4)
    assert divergence is not None
    assert divergence.within_error
    assert not divergence.oracle_agrees
    wrong = (*plain[:position], (twin + 7) % 256, *plain[position + 1 :])
    divergence = explain(model, PROMPT, plain, wrong, SamplingParams(), 1e-4)
    assert divergence is not None
    assert not divergence.within_error


def test_a_text_that_ends_early_is_not_explained(tied: tuple) -> None:
    model, plain, _, _ = tied
    divergence = explain(model, PROMPT, plain, plain[:-3], SamplingParams(), 1e-4)
    assert divergence is not None
    assert (divergence.position, divergence.strategy_token) == (len(plain) - 3, None)
    assert not divergence.is_explained


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--strategy"),
        (["--strategy", "magic"], "magic"),
        (["--strategy", "jacobi:windw=3"], "windw"),
        (["--strategy", "jacobi", "--tolerance", "0"], "--tolerance"),
        (["--strategy", "jacobi", "--prompts", "/no/such.jsonl"], "/no/such.jsonl"),
    ],
)
def test_a_mistake_is_one_line(run: Run, arguments: list[str], named: str) -> None:
    outcome = run("verify", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.splitlines() == outcome.error_lines
    assert named in outcome.error_lines[0]
