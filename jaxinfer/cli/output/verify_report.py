"""Puts an audit into words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxinfer.bench.identity.audit import TextAudit
    from jaxinfer.tokenizers import Tokenizer


@dataclass(frozen=True)
class Report:
    """An audit as a whole; ``promise`` is what the strategy says of its tokens (`Strategy.exactness`)."""

    strategy: str
    promise: str
    dtype: str
    tolerance: float
    prompts: int
    identical: int
    explained: int
    unexplained: int
    tokens: int
    drafted: int
    accepted: int
    accepted_deep: int
    passes: bool


def summarize(strategy: str, promise: str, dtype: str, tolerance: float, audits: Sequence["TextAudit"]) -> Report:
    """Count what the audits of all prompts found."""
    identical = sum(audit.divergence is None for audit in audits)
    passed = sum(audit.passes for audit in audits)
    return Report(
        strategy=strategy,
        promise=promise,
        dtype=dtype,
        tolerance=tolerance,
        prompts=len(audits),
        identical=identical,
        explained=passed - identical,
        unexplained=len(audits) - passed,
        tokens=sum(audit.new_tokens for audit in audits),
        drafted=sum(audit.drafted for audit in audits),
        accepted=sum(audit.accepted for audit in audits),
        accepted_deep=sum(audit.accepted_deep for audit in audits),
        passes=passed == len(audits),
    )


def prompt_line(number: int, audit: "TextAudit", tolerance: float, tokenizer: "Tokenizer") -> str:
    """Say of one prompt whether its texts are identical, or where they part and whether rounding explains it."""
    head = f"[{number}] {audit.new_tokens} tokens in {audit.steps} steps, {audit.accepted} of {audit.drafted} drafts: "
    found = audit.divergence
    if found is None:
        return f"{head}identical"

    def shown(token: int | None) -> str:
        return "the end" if token is None else f"{tokenizer.decode([token])!r} ({token})"

    parts = f"at token {found.position + 1} plain decoding has {shown(found.plain_token)}, "
    parts += f"the strategy {shown(found.strategy_token)}"
    if found.margin is not None:
        parts += f"; margin {found.margin:.2g} {'within' if found.within_error else 'beyond'} {tolerance:.2g}"
        parts += f", plain decoding restarted after it goes on {'alike' if found.oracle_agrees else 'otherwise'}"
    return f"{head}{'explained' if found.is_explained else 'NOT EXPLAINED'}: {parts}"


def verdict_lines(report: Report) -> list[str]:
    """Return the verdict, after what bears on it: a promise not made, drafts that never came to anything."""
    lines = []
    if report.promise != "identical":
        reason = {"distribution": "it keeps their distribution", "beam": "it searches for the likeliest text"}
        said = reason.get(report.promise, "it is lossy by design")
        lines.append(f"{report.strategy} does not promise the tokens of plain decoding: {said}")
    elif report.accepted_deep == 0:
        lines.append("no draft was accepted beyond the first of its step, so this audit says little: try other prompts")
    counts = f"{report.identical} of {report.prompts} texts identical, {report.tokens} tokens in {report.dtype}"
    if report.explained:
        counts += f", {report.explained} explained by margins within {report.tolerance:.2g}"
    if report.unexplained:
        counts += f", {report.unexplained} not explained"
    kind = "passed" if report.passes else "failed" if report.promise == "identical" else "differs"
    return [*lines, f"verdict: {kind}: {counts}"]
