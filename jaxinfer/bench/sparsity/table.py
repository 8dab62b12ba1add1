"""Formats a sparsity report as text."""

from jaxinfer.bench.columns import align
from jaxinfer.bench.sparsity.measure import SparsityReport


def sparsity_lines(report: SparsityReport) -> list[str]:
    """Return the report's lines: a table of layers, and one of steps."""
    title = (
        f"{report.model} in {report.dtype} with sparsity {report.sparsity} on {report.device} ({report.cores} cores): "
        f"{report.tokens} tokens"
    )
    steps = [f"{step.batch}x{step.nodes}" for step in report.steps]
    layers = [
        [str(layer.layer), f"{layer.zeros:.1%}", *(f"{share:.1%}" for share in layer.needed)] for layer in report.layers
    ]
    mean = [sum(column) / len(report.layers) for column in zip(*([one.zeros, *one.needed] for one in report.layers))]
    speeds = [
        [
            name,
            f"{step.skipped:.1%}",
            f"{1e3 * step.dense_seconds:.2f}",
            f"{1e3 * step.sparse_seconds:.2f}",
            f"{step.ratio:.2f}x",
        ]
        for name, step in zip(steps, report.steps)
    ]
    blocks = [
        [
            f"{step.batch}x{step.nodes}",
            *(f"{share:.1%}" for share in (step.stored, step.skipped_stored, step.ordered, step.skipped_ordered)),
        ]
        for step in report.blocks
    ]
    return [
        title,
        "",
        *align(
            ("layer", "zeros", *(f"needed by {name}" for name in steps)),
            [*layers, ["mean", *(f"{share:.1%}" for share in mean)]],
            num_left=1,
        ),
        "",
        *align(("batch x nodes", "weights not read", "dense ms", "sparse ms", "speed"), speeds, num_left=1),
        "",
        "on a TPU, by lists of live blocks of 128 hidden units:",
        *align(("batch x nodes", "live", "weights not read", "live in order", "not read in order"), blocks, num_left=1),
    ]
