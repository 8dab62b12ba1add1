"""A plan's report: whether a deployment fits, what each program moves and computes, and how fast it could be."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxinfer.decoding.fixed_rows import step_headroom
from jaxinfer.decoding.strategies.autoregressive import Autoregressive
from jaxinfer.decoding.strategies.draft_model import DraftModel
from jaxinfer.decoding.strategies.mtp import Mtp
from jaxinfer.decoding.strategies.sum_of_drafters import SumOfDrafters
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.planning.compile import CompiledProgram, DoesNotFit
from jaxinfer.planning.cost_model import acceptance_needed
from jaxinfer.planning.deployment import Deployment
from jaxinfer.planning.drafting import Drafting, plan_drafting
from jaxinfer.planning.footprint import (
    Footprint,
    count_footprint,
    decode_floor,
    estimate_prefill,
    estimate_step,
    pipeline_schedule,
    prefill_floor,
)
from jaxinfer.planning.hlo.walk import total
from jaxinfer.planning.latency import count_hops
from jaxinfer.planning.roofline import Work, roofline

Notice = Callable[[str], None]
COMPILER, ESTIMATE = "compiler", "estimate"


@dataclass(frozen=True)
class ProgramReport:
    """One run of a program (a step, or the prefill of all prompts) on one device.

    ``source`` is ``compiler``, or ``estimate`` if the program could not be compiled: then its work is the least
    possible. ``total_bytes`` is the device memory that it needs. ``hbm_bytes`` is its HBM traffic and ``floor_bytes``
    the least possible traffic. ``flops`` counts the operations of products, ``collectives`` count and bytes by kind,
    ``sent_bytes`` the bytes that the device sends for them. ``latency_seconds`` estimates what collectives take however
    few their bytes are. ``roofline_seconds`` is the longest of the three times before it, plus the latency; ``bound``
    names the longest of the four. A run gives at most ``tokens`` tokens over all rows, so ``tokens_per_second`` is an
    upper bound for the whole mesh. ``bubble`` is the fraction of a pass in which a pipeline stage is idle; bytes and
    operations include the idle time.
    """

    source: str
    total_bytes: int
    temporaries_bytes: int
    hbm_bytes: int
    floor_bytes: int
    flops: int
    collectives: Mapping[str, Mapping[str, int]]
    sent_bytes: int
    hbm_seconds: float
    mxu_seconds: float
    ici_seconds: float
    latency_seconds: float
    roofline_seconds: float
    bound: str
    tokens: int
    tokens_per_second: float
    bubble: float
    compile_seconds: float | None


@dataclass(frozen=True)
class Speculation:
    """What a strategy must gain: a step costs ``cost`` plain steps, so it must give that many tokens on average.

    ``acceptance`` is the acceptance rate needed for that with a chain of ``depth`` drafts; None if no rate is enough.
    """

    nodes: int
    depth: int
    cost: float
    acceptance: float | None


@dataclass(frozen=True)
class PlanReport:
    """A plan; all bytes are per device.

    ``weights`` are the few bits of kernels, None for ``dtype``, and ``activations`` those of what they multiply.
    ``sparsity`` is which features steps leave out, and ``live_share`` how many of their blocks are taken to be live.
    ``step_rows`` is the number of nodes that steps are filled up to, 1 for none. ``weights_bytes`` and ``cache_bytes``
    are the model's. ``temporaries_bytes`` and ``hbm_total_bytes`` are the largest of any program. ``missing_bytes`` is
    the excess of ``hbm_total_bytes`` over ``hbm_capacity_bytes``. ``drafting`` is of strategies that adapt.
    """

    topology: str
    mesh: str
    num_devices: int
    batch: int
    max_len: int
    num_slots: int
    prompt_tokens: int
    dtype: str
    weights: str | None
    activations: str | None
    sparsity: str | None
    live_share: float
    step_rows: int
    strategy: str
    fits: bool
    hbm_total_bytes: int
    hbm_capacity_bytes: int
    missing_bytes: int
    weights_bytes: int
    cache_bytes: int
    temporaries_bytes: int
    programs: Mapping[str, ProgramReport]
    speculation: Speculation | None
    drafting: Sequence[Drafting] | None = None


def make_plan(deployment: Deployment, notice: Notice = lambda line: None) -> PlanReport:
    """Compile a deployment's programs and report on them; programs that are too large to compile are estimated."""
    footprint = count_footprint(deployment)
    notice(f"compiling decode and prefill for {deployment.topology}, mesh {deployment.mesh}")
    plain = _attempt(deployment)
    programs = {
        "prefill": _program(deployment, footprint, "prefill", plain.compiled.get("prefill"), plain.required_bytes),
        "decode": _program(deployment, footprint, "decode", plain.compiled.get("decode"), plain.required_bytes),
    }
    if deployment.speculates:
        own = _Attempt({}, plain.required_bytes)
        if own.required_bytes is None:
            notice(f"compiling a step that verifies {deployment.strategy.num_nodes} nodes")
            own = _attempt(deployment, deployment.strategy)
        programs["verify"] = _program(deployment, footprint, "verify", own.compiled.get("decode"), own.required_bytes)
    capacity = deployment.chip.device_hbm_bytes
    needed = max(program.total_bytes for program in programs.values())
    fits = all(program.source == COMPILER for program in programs.values())
    return PlanReport(
        topology=deployment.topology,
        mesh=str(deployment.mesh),
        num_devices=deployment.mesh.num_devices,
        batch=deployment.batch,
        max_len=deployment.max_len,
        num_slots=deployment.num_slots,
        prompt_tokens=deployment.prompt_tokens,
        dtype=deployment.dtype,
        weights=deployment.weights,
        activations=deployment.activations,
        sparsity=deployment.sparsity,
        live_share=deployment.live_share,
        step_rows=deployment.split.backend.fixed_rows,
        strategy=f"{deployment.nodes} nodes" if deployment.nodes else deployment.strategy_spec,
        fits=fits,
        hbm_total_bytes=needed,
        hbm_capacity_bytes=capacity,
        missing_bytes=max(0, needed - capacity),
        weights_bytes=footprint.weights_bytes,
        cache_bytes=footprint.cache_bytes,
        temporaries_bytes=max(program.temporaries_bytes for program in programs.values()),
        programs=programs,
        speculation=_speculation(deployment, programs) if deployment.speculates else None,
        drafting=plan_drafting(deployment) if deployment.strategy.adapts else None,
    )


class _Attempt(NamedTuple):
    """The programs that compiled, and the least memory that a refused program needs; None if none was refused."""

    compiled: Mapping[str, CompiledProgram]
    required_bytes: int | None


def _attempt(deployment: Deployment, strategy: Strategy | None = None) -> _Attempt:
    try:
        compiled, required = deployment.compile(strategy), None
    except DoesNotFit as refused:
        compiled, required = refused.compiled, refused.required_bytes or deployment.chip.device_hbm_bytes + 1
    return _Attempt(compiled, required)


def _program(
    deployment: Deployment, footprint: Footprint, name: str, program: CompiledProgram | None, required: int | None
) -> ProgramReport:
    """Report on a compiled program, or on the least work of one that did not compile."""
    strategy = deployment.strategy if name == "verify" else Autoregressive()
    drafts, nodes = strategy.max_depth, step_headroom(strategy, deployment.split.backend)
    is_prefill = name == "prefill"
    if program is not None:
        counted = total(program.instructions(inner_trips=drafting_trips(strategy)))
        hops = count_hops(counted.groups, deployment.topology)
        work = Work(counted.hbm_bytes, counted.flops, counted.sent_bytes, counted.collectives, hops)
        # A prompt's tokens share few dead blocks: the share is that of a step.
        if not is_prefill and (products := program.block_products(inner_trips=drafting_trips(strategy))):
            dead_flops = (1 - deployment.live_share) * sum(each.flops * each.runs for each in products)
            dead_bytes = footprint.dead_bytes * pipeline_schedule(deployment, nodes).ticks
            work = replace(work, hbm_bytes=work.hbm_bytes - dead_bytes, flops=work.flops - round(dead_flops))
        needed, temporaries = program.total_bytes, program.temporary_bytes
    else:
        work = estimate_prefill(deployment, footprint) if is_prefill else estimate_step(deployment, footprint, nodes)
        needed = max(required or 0, footprint.total_bytes)
        temporaries = needed - footprint.total_bytes
    times = roofline(work, deployment.chip, deployment.dtype)
    tokens = deployment.batch * (deployment.prompt_tokens if is_prefill else drafts + 1)
    floor = decode_floor(footprint, deployment.rows // deployment.mesh.data * nodes)
    return ProgramReport(
        source=ESTIMATE if program is None else COMPILER,
        total_bytes=needed,
        temporaries_bytes=temporaries,
        hbm_bytes=work.hbm_bytes,
        floor_bytes=prefill_floor(deployment, footprint) if is_prefill else floor,
        flops=work.flops,
        collectives={kind: {"count": count, "bytes": size} for kind, (count, size) in work.collectives.items()},
        sent_bytes=work.sent_bytes,
        hbm_seconds=times.hbm_seconds,
        mxu_seconds=times.mxu_seconds,
        ici_seconds=times.ici_seconds,
        latency_seconds=times.latency_seconds,
        roofline_seconds=times.seconds,
        bound=times.bound,
        tokens=tokens,
        tokens_per_second=tokens / times.seconds,
        bubble=pipeline_schedule(deployment, deployment.prompt_tokens if is_prefill else nodes).bubble,
        compile_seconds=None if program is None else program.compile_seconds,
    )


def drafting_trips(strategy: Strategy) -> int:
    """Return how often the loop in which a step drafts runs at the most.

    The first pass of a chain that a model drafts stands before its loop (`draft_chain`).
    """
    if isinstance(strategy, SumOfDrafters):
        return max(map(drafting_trips, strategy.parts))
    return strategy.max_depth - isinstance(strategy, DraftModel | Mtp)


def _speculation(deployment: Deployment, programs: Mapping[str, ProgramReport]) -> Speculation:
    strategy = deployment.strategy
    cost = programs["verify"].roofline_seconds / programs["decode"].roofline_seconds
    return Speculation(strategy.num_nodes, strategy.max_depth, cost, acceptance_needed(cost, strategy.max_depth))
