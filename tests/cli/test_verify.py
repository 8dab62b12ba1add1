"""``jaxinfer verify`` passes what is identical in every bit or, where bits may differ, explained; and nothing else."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import numpy as np
import pytest

from jaxinfer import SamplingParams
from jaxinfer.bench.identity.audit import Divergence, TextAudit, explain, retell_text
from jaxinfer.bench.identity.bisect import Difference, Variant
from jaxinfer.cli import loading
from jaxinfer.cli.output.verify_report import bisect_line
from jaxinfer.cli.sample_prompts import SAMPLE_PROMPTS
from jaxinfer.decoding import registry
from jaxinfer.decoding.strategies.prompt_lookup import PromptLookup
from jaxinfer.language_model import LanguageModel
from jaxinfer.models import mlp
from jaxinfer.ops.backend import Backend, choose_backend
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


@pytest.mark.exhaustive
def test_an_identical_strategy_passes_on_prompts_that_nobody_gave(verify: Run) -> None:
    outcome = verify("--strategy", "prompt_lookup", "--temperature", "0.5", "--seed", "3")
    lines = outcome.out.splitlines()
    assert (outcome.code, outcome.err) == (0, "")
    assert len(lines) == len(SAMPLE_PROMPTS) + 1
    assert all(line.endswith("identical in every bit") for line in lines[:-1])
    count = len(SAMPLE_PROMPTS)
    assert lines[-1].startswith(f"verdict: passed: {count} of {count} texts identical, {count} of them in every bit")


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

    claims = {
        "lossy": "lossy by design",
        "distribution": "keeps their distribution",
        "beam": "searches for the likeliest text",
        "search": "searches for the text that is worth most",
    }
    for claim, reason in claims.items():
        outcome = verify(*arguments, f"gullible:claim={claim}")
        assert outcome.code == 1
        *_, said, verdict = outcome.out.splitlines()
        assert "does not promise the tokens of plain decoding" in said
        assert reason in said
        assert verdict.startswith("verdict: differs: 0 of 1")


@pytest.fixture
def batches_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a batch change log-probabilities a little: in each text's third token by the least that float32 has."""
    original = LanguageModel.generate_batches

    def generate_batches(self: LanguageModel, *arguments: Any, batch_size: int, **options: Any) -> Any:
        for batch in original(self, *arguments, batch_size=batch_size, **options):
            yield [nudged(result) for result in batch] if batch_size > 1 else batch

    def nudged(result: Any) -> Any:
        numbers = np.asarray(result.logprobs, np.float32)
        numbers[2] = np.nextafter(numbers[2], np.float32(-100))
        return replace(result, logprobs=tuple(numbers.tolist()))

    monkeypatch.setattr(LanguageModel, "generate_batches", generate_batches)


@pytest.mark.usefixtures("batches_differ")
def test_a_batch_is_held_to_the_bits_of_each_prompt_alone(verify: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("The quick fox", "--strategy", "prompt_lookup", "--batch-size")
    outcome = verify(*arguments, "1")
    assert outcome.code == 0
    assert "1 of 1 texts identical, 1 of them in every bit, 24 tokens in float32" in outcome.out.splitlines()[-1]

    outcome = verify(*arguments, "2")
    assert outcome.code == 1
    line, *_, reason, verdict = outcome.out.splitlines()
    assert "NOT EXPLAINED: equal tokens, but log-probabilities differ by up to " in line
    assert "no margin explains" in reason
    assert verdict.startswith("verdict: failed: 1 of 1 texts identical, 0 of them in every bit")
    found = json.loads(verify(*arguments, "2", "--json").out)
    (text,) = found["texts"]
    counted = {"identical": 1, "bits_equal": 0, "unexplained": 1, "explained": 0, "needs_bits": True, "passes": False}
    assert {name: found[name] for name in counted} == counted
    assert 0 < found["largest_difference"] == text["largest_difference"] < 1e-5
    assert (text["divergence"], text["bits_equal"]) == (None, False)

    # Where bits are not kept, tokens count.
    monkeypatch.setattr(Backend, "keeps_bits", False)
    outcome = verify(*arguments, "2")
    assert outcome.code == 0
    assert ": identical tokens, log-probabilities differ by up to " in outcome.out
    assert "verdict: passed: 1 of 1 texts identical, 0 of them in every bit" in outcome.out


def test_a_margin_explains_nothing_where_bits_are_kept() -> None:
    tie = Divergence(3, 7, 8, margin=1e-9, within_error=True, oracle_agrees=True)
    audits = [TextAudit(9, 5, 4, 3, 2, tie, False, 0.0, needs_bits, ()) for needs_bits in (False, True)]
    assert [audit.passes for audit in audits] == [True, False]


def test_bits_are_kept_by_the_kernels_of_a_cpu_alone() -> None:
    kernels = choose_backend("float32", "cpu")
    assert all(choose_backend(dtype, "cpu").keeps_bits for dtype in ("float32", "bfloat16"))
    others = [replace(kernels, param_dtype="float64"), replace(kernels, kernels="interpret")]
    others += [choose_backend("float32", "tpu"), choose_backend("float32", "cpu", scan_layers=True)]
    assert not any(backend.keeps_bits for backend in others)


@pytest.mark.slow
def test_a_bisection_names_the_first_operation_that_differs(
    run: Run, model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("verify", "x", "--strategy", "autoregressive", "--max-new-tokens", "4", "--bisect")
    fresh = lambda: LanguageModel(model.config, model.params, model.backend, tokenizer=model.tokenizer)  # noqa: E731
    monkeypatch.setattr(loading, "load_model", lambda options: fresh())
    assert run(*arguments).out.splitlines()[1] == "bisect: no operation differs"

    silu = jax.nn.silu
    disturbed = lambda inputs: silu(inputs) + (1e-3 if inputs.shape[0] == 3 else 0)  # noqa: E731
    monkeypatch.setattr(mlp, "ACTIVATIONS", {**mlp.ACTIVATIONS, "silu": disturbed})
    outcome = run(*arguments, "--json")
    found = json.loads(outcome.out)["bisect"]
    assert outcome.code == 0
    assert (found["text"], found["operation"], found["layer"]) == (1, "blocks.layer_0.mlp.activated", 0)
    assert (found["variant"], found["token"]) == ("as row 2 of 3", 0)
    assert 1e-4 < found["largest"] < 1e-2


def test_a_bisection_is_one_line() -> None:
    found = Difference(Variant(cuts=(4,)), "blocks.layer_3.attention.queries", 4, 5, 96, 1.25e-7)
    said = "bisect: blocks.layer_3.attention.queries is the first operation that differs, in layer 3: text 2, token 5, "
    assert bisect_line((1, found)) == said + "5 of 96 numbers by up to 1.2e-07, cut after 4 tokens"
    assert "differs: text 1" in bisect_line((0, replace(found, operation="logits")))
    assert bisect_line(None) == "bisect: no operation differs"


def test_a_bisection_of_scanned_layers_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    scanned = LanguageModel(TINY_LLAMA, random_params(TINY_LLAMA, scan_layers=True), float32_backend(True))
    monkeypatch.setattr(loading, "load_model", lambda options: scanned)
    outcome = run("verify", "x", "--strategy", "autoregressive", "--bisect")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.splitlines() == outcome.error_lines
    assert "cannot be bisected" in outcome.err


def test_an_audit_without_accepted_drafts_says_that_it_says_little(verify: Run) -> None:
    outcome = verify("x", "--strategy", "autoregressive")
    assert outcome.code == 0
    assert "this audit says little" in outcome.out


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_tie_explains_a_divergence_and_what_follows_from_it(tied: tuple) -> None:
    model, plain, position, twin = tied
    found = (*plain[:position], twin, *plain[position + 1 :])
    divergence = explain(model, PROMPT, plain, found, SamplingParams(), 1e-4)
    assert divergence is not None
    assert (divergence.position, divergence.plain_token, divergence.strategy_token) == (position, plain[position], twin)
    assert divergence.margin == pytest.approx(0, abs=1e-5)
    assert divergence.is_explained
    assert explain(model, PROMPT, plain, plain, SamplingParams(), 1e-4) is None


@pytest.mark.slow
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
