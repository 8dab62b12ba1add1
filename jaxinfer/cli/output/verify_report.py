"""Puts an audit into words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxinfer.bench.identity.audit import TextAudit
    from jaxinfer.bench.identity.bisect import Difference
    from jaxinfer.tokenizers import Tokenizer


@dataclass(frozen=True)
class Report:
    """An audit as a whole; ``promise`` is what the strategy says of its tokens (`Strategy.exactness`).

    ``identical`` counts texts with equal tokens, ``bits_equal`` those whose log-probabilities are equal too. If the
    audit ``needs_bits``, all others are ``unexplained``.
    """

    strategy: str
    promise: str
    dtype: str
    tolerance: float
    prompts: int
    identical: int
    bits_equal: int
    largest_difference: float
    needs_bits: bool
    explained: int
    unexplained: int
    tokens: int
    drafted: int
    accepted: int
    accepted_deep: int
    passes: bool


def summarize(strategy: str, promise: str, dtype: str, tolerance: float, audits: Sequence["TextAudit"]) -> Report:
    """Count what the audits of all prompts found."""
    passed = sum(audit.passes for audit in audits)
    return Report(
        strategy=strategy,
        promise=promise,
        dtype=dtype,
        tolerance=tolerance,
        prompts=len(audits),
        identical=sum(audit.divergence is None for audit in audits),
        bits_equal=sum(audit.bits_equal for audit in audits),
        largest_difference=max((audit.largest_difference for audit in audits), default=0.0),
        needs_bits=any(audit.needs_bits for audit in audits),
        explained=sum(audit.passes and audit.divergence is not None for audit in audits),
        unexplained=len(audits) - passed,
        tokens=sum(audit.new_tokens for audit in audits),
        drafted=sum(audit.drafted for audit in audits),
        accepted=sum(audit.accepted for audit in audits),
        accepted_deep=sum(audit.accepted_deep for audit in audits),
        passes=passed == len(audits),
    )


def prompt_line(number: int, audit: "TextAudit", tolerance: float, tokenizer: "Tokenizer") -> str:
    """Say of one prompt whether its texts are identical, to the bits, or where they part and what explains it."""
    head = f"[{number}] {audit.new_tokens} tokens in {audit.steps} steps, {audit.accepted} of {audit.drafted} drafts: "
    found = audit.divergence
    gap = f"log-probabilities differ by up to {audit.largest_difference:.2g}"
    if audit.bits_equal:
        return f"{head}identical in every bit"
    if found is None:
        return f"{head}identical tokens, {gap}" if audit.passes else f"{head}NOT EXPLAINED: equal tokens, but {gap}"

    def shown(token: int | None) -> str:
        return "the end" if token is None else f"{tokenizer.decode([token])!r} ({token})"

    parts = f"at token {found.position + 1} plain decoding has {shown(found.plain_token)}, "
    parts += f"the strategy {shown(found.strategy_token)}"
    if found.margin is not None:
        parts += f"; margin {found.margin:.2g} {'within' if found.within_error else 'beyond'} {tolerance:.2g}"
        parts += f", plain decoding restarted after it goes on {'alike' if found.oracle_agrees else 'otherwise'}"
    if audit.largest_difference:
        parts += f"; before it {gap}"
    return f"{head}{'explained' if audit.passes else 'NOT EXPLAINED'}: {parts}"


def bisect_line(found: tuple[int, "Difference"] | None) -> str:
    """Say which operation is the first whose results depend on how a text, given by its index, is run."""
    if found is None:
        return "bisect: no operation differs"
    index, first = found
    said = f"bisect: {first.operation} is the first operation that differs"
    said += "" if first.layer is None else f", in layer {first.layer}"
    counts = f"{first.count} of {first.total} numbers by up to {first.largest:.2g}"
    return f"{said}: text {index + 1}, token {first.token + 1}, {counts}, {first.variant}"


def verdict_lines(report: Report) -> list[str]:
    """Return the verdict, after what bears on it: a promise not made, drafts that never came to anything."""
    lines = []
    if report.promise != "identical":
        reason = {
            "distribution": "it keeps their distribution",
            "beam": "it searches for the likeliest text",
            "search": "it searches for the text that is worth most",
        }
        said = reason.get(report.promise, "it is lossy by design")
        lines.append(f"{report.strategy} does not promise the tokens of plain decoding: {said}")
    elif report.accepted_deep == 0:
        lines.append("no draft was accepted beyond the first of its step, so this audit says little: try other prompts")
    if report.needs_bits and not report.passes:
        lines.append("the kernels of this device keep every bit, so that no margin explains a difference")
    counts = f"{report.identical} of {report.prompts} texts identical, {report.bits_equal} of them in every bit, "
    counts += f"{report.tokens} tokens in {report.dtype}"
    if report.largest_difference:
        counts += f", log-probabilities within {report.largest_difference:.2g}"
    if report.explained:
        counts += f", {report.explained} explained by margins within {report.tolerance:.2g}"
    if report.unexplained:
        counts += f", {report.unexplained} not explained"
    kind = "passed" if report.passes else "failed" if report.promise == "identical" else "differs"
    return [*lines, f"verdict: {kind}: {counts}"]
