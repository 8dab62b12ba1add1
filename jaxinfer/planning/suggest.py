"""Finds meshes, slices, batch sizes and lengths that fit: counts them first, then compiles to confirm."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from jaxinfer.errors import InvalidOption
from jaxinfer.models.stages import num_stages
from jaxinfer.parallel.mesh import MeshConfig
from jaxinfer.planning.deployment import Deployment
from jaxinfer.planning.footprint import Footprint, count_footprint, estimate_step
from jaxinfer.planning.report import Notice, PlanReport, make_plan
from jaxinfer.planning.roofline import roofline
from jaxinfer.planning.topology import num_devices, slices_of

# The number of tries with a smaller batch or length.
_TRIES = 5
_LENGTH_STEP = 128
_MARGIN = 0.005


@dataclass(frozen=True)
class Candidate:
    """A deployment that fits: it compiles. ``hbm_total_bytes`` is per device, ``tokens_per_second`` per mesh."""

    topology: str
    mesh: str
    num_devices: int
    batch: int
    max_len: int
    hbm_total_bytes: int
    tokens_per_second: float
    compile_seconds: float


@dataclass(frozen=True)
class Alternatives:
    """What fits in place of a deployment that does not. Each changes one setting; None if nothing fits."""

    smallest_topology: Candidate | None
    largest_batch: Candidate | None
    longest_context: Candidate | None


def suggest_meshes(
    deployment: Deployment, known: PlanReport | None = None, *, most: int = 3, notice: Notice = lambda line: None
) -> list[Candidate]:
    """Return up to ``most`` meshes of the deployment's devices that fit, the fastest first.

    They are tried in the order of their counted rooflines. ``known`` is the report on the deployment's own mesh, which
    is then not compiled again.
    """

    def seconds(pair: tuple[Deployment, Footprint]) -> float:
        one, footprint = pair
        return roofline(estimate_step(one, footprint), one.chip, one.dtype).seconds

    found: list[Candidate] = []
    for one, _ in sorted(_counted(deployment, deployment.topology), key=seconds):
        report = known if known is not None and one.mesh == deployment.mesh else _compiled(one, notice)
        if report.fits:
            found.append(_candidate(report))
        if len(found) == most:
            break
    return sorted(found, key=lambda candidate: -candidate.tokens_per_second)


def find_alternatives(deployment: Deployment, refused: PlanReport, notice: Notice = lambda line: None) -> Alternatives:
    """Search for the smallest slice of the same chip, the largest batch and the longest sequences that fit.

    ``refused`` is the report on the deployment, which does not fit.
    """

    def with_batch(batch: int) -> Deployment:
        return replace(deployment, batch=batch)

    def with_length(length: int) -> Deployment:
        prompt_tokens = min(deployment.prompt_tokens, 1 << (length.bit_length() - 1))
        return replace(deployment, max_len=length, prompt_tokens=prompt_tokens)

    return Alternatives(
        smallest_topology(deployment, notice),
        _lowered(refused, deployment.batch, deployment.mesh.data, with_batch, notice),
        _lowered(refused, deployment.max_len, _LENGTH_STEP, with_length, notice),
    )


def smallest_topology(deployment: Deployment, notice: Notice = lambda line: None) -> Candidate | None:
    """Return the smallest slice of the same chip that fits; on each, only the mesh with most free memory is tried."""
    for topology in slices_of(deployment.chip):
        counted = _counted(deployment, topology)
        roomiest = min(counted, key=lambda pair: pair[1].total_bytes, default=None)
        if roomiest is not None and (report := _compiled(roomiest[0], notice)).fits:
            return _candidate(report)
    return None


def _lowered(
    refused: PlanReport, asked: int, step: int, resized: Callable[[int], Deployment], notice: Notice
) -> Candidate | None:
    """Lower a size until the compiler accepts it. All memory except the weights is proportional to it.

    The memory that one size needs beyond the weights predicts that of a smaller one. The compiler's numbers are
    rounded, so each try leaves a little more room.
    """
    weights, capacity = refused.weights_bytes, refused.hbm_capacity_bytes
    needed, size = refused.hbm_total_bytes, asked
    for attempt in range(_TRIES):
        share = (capacity - weights) / max(1, needed - weights) * (1 - _MARGIN * attempt)
        size = min(size - step, int(size * share)) // step * step
        if size < step:
            return None
        try:
            one = resized(size)
        except InvalidOption:  # a strategy that needs longer sequences
            return None
        needed = count_footprint(one).total_bytes
        if needed > capacity:
            continue
        report = _compiled(one, notice)
        if report.fits:
            return _candidate(report)
        needed = max(report.hbm_total_bytes, capacity + 1)
    return None


def _counted(deployment: Deployment, topology: str) -> list[tuple[Deployment, Footprint]]:
    """Return the deployments on a topology's meshes that have room for weights, cache and state."""
    room = deployment.chip.device_hbm_bytes
    pairs = [(one, count_footprint(one)) for one in _on_meshes(deployment, topology)]
    return [(one, footprint) for one, footprint in pairs if footprint.total_bytes <= room]


def _on_meshes(deployment: Deployment, topology: str) -> Iterator[Deployment]:
    devices = num_devices(topology)
    for data in range(1, min(devices, deployment.batch) + 1):
        if devices % data == 0 and deployment.batch % data == 0:
            for stages in _stage_counts(deployment, devices // data):
                rest = devices // data // stages
                for sequence in _sequence_sizes(deployment, rest) if stages == 1 else [1]:
                    mesh = MeshConfig(data=data, pipeline=stages, sequence=sequence, tensor=rest // sequence)
                    yield replace(deployment, topology=topology, mesh=mesh)


def _sequence_sizes(deployment: Deployment, devices: int) -> list[int]:
    """Return the numbers of devices to split slots over: 1 unless the deployment splits them too."""
    splits = deployment.mesh.sequence > 1
    return [size for size in range(1, devices + 1) if devices % size == 0 and (splits or size == 1)]


def _stage_counts(deployment: Deployment, devices: int) -> list[int]:
    counts = (count for count in range(1, devices + 1) if devices % count == 0)
    return [count for count in counts if num_stages(deployment.config, count) == count]


def _compiled(deployment: Deployment, notice: Notice) -> PlanReport:
    notice(
        f"trying batch {deployment.batch} of {deployment.max_len} tokens on {deployment.topology}, "
        f"mesh {deployment.mesh}"
    )
    return make_plan(deployment)


def _candidate(report: PlanReport) -> Candidate:
    programs = report.programs
    return Candidate(
        topology=report.topology,
        mesh=report.mesh,
        num_devices=report.num_devices,
        batch=report.batch,
        max_len=report.max_len,
        hbm_total_bytes=report.hbm_total_bytes,
        tokens_per_second=programs["decode"].tokens_per_second,
        compile_seconds=sum(program.compile_seconds or 0.0 for program in programs.values()),
    )
