"""What would fit: meshes, slices, batches and lengths, counted first and then confirmed by compiling them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from jaxinfer.errors import InvalidOption
from jaxinfer.parallel.mesh import MeshConfig
from jaxinfer.planning.compile import DoesNotFit
from jaxinfer.planning.deployment import Deployment
from jaxinfer.planning.footprint import Footprint, count_footprint, estimate_step
from jaxinfer.planning.hlo_walk import total
from jaxinfer.planning.report import Notice
from jaxinfer.planning.roofline import Work, roofline
from jaxinfer.planning.topology import num_devices, slices_of

# How often a batch or a length is lowered to what the compiler's last answer leaves room for.
_TRIES = 5
_LENGTH_STEP = 128


@dataclass(frozen=True)
class Candidate:
    """A deployment whose programs the compiler made, so that it fits; bytes of one device, tokens of the whole mesh."""

    topology: str
    mesh: str
    num_devices: int
    batch: int
    max_len: int
    hbm_total_bytes: int
    tokens_per_second: float


@dataclass(frozen=True)
class Alternatives:
    """What fits in place of a deployment that does not, the rest being as asked; None where nothing does."""

    smallest_topology: Candidate | None
    largest_batch: Candidate | None
    longest_context: Candidate | None


def suggest_meshes(deployment: Deployment, most: int = 3, notice: Notice = lambda line: None) -> list[Candidate]:
    """Return up to ``most`` meshes of the deployment's devices that fit, the fastest first by the counted roofline."""
    found: list[Candidate] = []

    def seconds(pair: tuple[Deployment, Footprint]) -> float:
        one, footprint = pair
        return roofline(estimate_step(one, footprint), one.chip, one.dtype).seconds

    for one, _ in sorted(_counted(deployment, deployment.topology), key=seconds):
        if (candidate := _confirmed(one, notice)) is not None:
            found.append(candidate)
        if len(found) == most:
            break
    return sorted(found, key=lambda candidate: -candidate.tokens_per_second)


def find_alternatives(deployment: Deployment, notice: Notice = lambda line: None) -> Alternatives:
    """Search for the smallest slice of the same chip, the largest batch and the longest texts that fit."""
    return Alternatives(
        smallest_topology(deployment, notice), largest_batch(deployment, notice), longest_context(deployment, notice)
    )


def smallest_topology(deployment: Deployment, notice: Notice = lambda line: None) -> Candidate | None:
    """Return the smallest slice of the same chip on which a mesh fits: of a slice's meshes the one with most room."""
    for topology in slices_of(deployment.chip):
        counted = _counted(deployment, topology)
        roomiest = min(counted, key=lambda pair: pair[1].total_bytes, default=None)
        if roomiest is not None and (candidate := _confirmed(roomiest[0], notice)) is not None:
            return candidate
    return None


def largest_batch(deployment: Deployment, notice: Notice = lambda line: None) -> Candidate | None:
    """Return the largest batch that fits where the deployment's does not, of the same texts on the same mesh."""
    step = deployment.mesh.data
    return _lowered(deployment, deployment.batch, step, lambda batch: replace(deployment, batch=batch), notice)


def longest_context(deployment: Deployment, notice: Notice = lambda line: None) -> Candidate | None:
    """Return the longest texts that fit where the deployment's do not, of the same batch on the same mesh."""

    def resized(length: int) -> Deployment:
        prompt_tokens = min(deployment.prompt_tokens, 1 << (length.bit_length() - 1))
        return replace(deployment, max_len=length, prompt_tokens=prompt_tokens)

    return _lowered(deployment, deployment.max_len, _LENGTH_STEP, resized, notice)


def _lowered(
    deployment: Deployment, asked: int, step: int, resized: Callable[[int], Deployment], notice: Notice
) -> Candidate | None:
    """Lower a size, of which all but the weights is proportional, until the compiler agrees.

    What the compiler says that a size needs beyond the weights tells what a smaller one would.
    """
    weights, capacity = count_footprint(deployment).weights_bytes, deployment.chip.device_hbm_bytes
    needed, size = count_footprint(deployment).total_bytes, asked
    for _ in range(_TRIES):
        size = min(size - step, int(size * (capacity - weights) / max(1, needed - weights))) // step * step
        if size < step:
            return None
        one = resized(size)
        needed = count_footprint(one).total_bytes
        if needed > capacity:
            continue
        notice(f"compiling batch {one.batch} of {one.max_len} tokens on {one.topology}, mesh {one.mesh}")
        try:
            return _compiled(one)
        except DoesNotFit as refused:
            needed = max(needed, refused.required_bytes or 0, capacity + 1)
    return None


def _counted(deployment: Deployment, topology: str) -> list[tuple[Deployment, Footprint]]:
    """Return the deployments on meshes of a topology whose weights, cache and state leave room."""
    room = deployment.chip.device_hbm_bytes
    pairs = [(one, count_footprint(one)) for one in _on_meshes(deployment, topology)]
    return [(one, footprint) for one, footprint in pairs if footprint.total_bytes <= room]


def _on_meshes(deployment: Deployment, topology: str) -> Iterator[Deployment]:
    devices = num_devices(topology)
    for data in range(1, min(devices, deployment.batch) + 1):
        if devices % data or deployment.batch % data:
            continue
        try:
            yield replace(deployment, topology=topology, mesh=MeshConfig(data=data, tensor=devices // data))
        except InvalidOption:  # a model that does not split so far
            continue


def _confirmed(deployment: Deployment, notice: Notice) -> Candidate | None:
    notice(f"compiling for {deployment.topology}, mesh {deployment.mesh}")
    try:
        return _compiled(deployment)
    except DoesNotFit:
        return None


def _compiled(deployment: Deployment) -> Candidate:
    """Compile a deployment's programs; raise DoesNotFit where one does not fit."""
    programs = deployment.compile()
    needed = max(program.total_bytes for program in programs.values())
    if deployment.speculates:
        needed = max(needed, deployment.compile(deployment.strategy)["decode"].total_bytes)
    counted = total(programs["decode"].instructions())
    work = Work(counted.hbm_bytes, counted.flops, counted.sent_bytes, counted.collectives)
    return Candidate(
        deployment.topology,
        str(deployment.mesh),
        deployment.mesh.num_devices,
        deployment.batch,
        deployment.max_len,
        needed,
        deployment.batch / roofline(work, deployment.chip, deployment.dtype).seconds,
    )
