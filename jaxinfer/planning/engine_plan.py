"""How many rows and pages of an engine fit into a chip or a slice, and how fast these rows decode at best."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxinfer.planning.compile import CompiledProgram, DoesNotFit
from jaxinfer.planning.engine_window import EngineDeployment, compile_window
from jaxinfer.planning.hlo.walk import Instruction, total
from jaxinfer.planning.latency import count_hops
from jaxinfer.planning.roofline import Work, roofline

Notice = Callable[[str], None]

# The number of tries with more or fewer rows.
_TRIES = 6
# The name of the kernel `paged_decode` in a program.
_IN_PLACE = "attend_pages"


@dataclass(frozen=True)
class WindowReport:
    """A step of a window of ``rows`` rows, all of the longest texts; bytes and operations are one device's.

    ``pages`` is how many fit into a group beside weights and temporaries, page 0 included. Of ``hbm_bytes``, a step
    must move ``floor_bytes``: the weights and the pages that the rows see, once. What a window does once, before its
    first step and after its last, is shared among its steps. ``temporaries_share`` is of ``pool_bytes``, the pages that
    a group's rows need. ``pools_in_place`` says whether the program writes its pools where they lie, ``pages_in_place``
    whether a kernel reads pages there, instead of copies of them. Times are as in `ProgramReport`;
    ``tokens_per_second`` is of all rows.
    """

    rows: int
    pages: int
    pool_bytes: int
    total_bytes: int
    temporaries_bytes: int
    temporaries_share: float
    pools_in_place: bool
    pages_in_place: bool
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
    tokens_per_second: float
    tokens_per_second_per_row: float
    compile_seconds: float


@dataclass(frozen=True)
class EnginePlan:
    """An engine's plan; bytes are of one device.

    ``rows_asked`` is None where as many rows are planned as fit; it ``fits`` if they do, or if at least one does.
    ``window`` is that of the rows asked for, or else of the most that were found to fit, None if there are none.
    ``counted_bytes`` are the weights and the pages of the rows asked for, or of one row.
    """

    topology: str
    mesh: str
    num_devices: int
    dtype: str
    max_len: int
    page_size: int
    pages_per_row: int
    rows_asked: int | None
    fits: bool
    hbm_capacity_bytes: int
    weights_bytes: int
    page_bytes: int
    counted_bytes: int
    window: WindowReport | None


class Found(NamedTuple):
    """A number of rows that fits, its window, and the fewest rows that the compiler refused, None if it did not."""

    rows: int
    program: CompiledProgram
    refused: int | None = None


def plan_engine(asked: EngineDeployment, notice: Notice = lambda line: None) -> EnginePlan:
    """Compile an engine's window for the rows asked for, or for the most that fit, and report on it."""

    def compiled(rows: int) -> CompiledProgram:
        notice(f"compiling a window of {rows} rows for {asked.topology}, mesh {asked.mesh}")
        return compile_window(asked, rows)

    capacity = asked.chip.device_hbm_bytes
    counted = _counted(asked, asked.rows or 1)
    found, first = None, rows_by_pages(asked, capacity - asked.weights_bytes)
    if asked.rows is not None and counted <= capacity:
        found = fitting(asked, compiled, asked.rows)
    fits = found is not None
    if found is None:
        first = first if asked.rows is None else min(first, asked.rows - 1)
        found = most_rows(compiled, capacity, asked.weights_bytes, first, asked.mesh.data)
        fits = found is not None and asked.rows is None
    return EnginePlan(
        topology=asked.topology,
        mesh=str(asked.mesh),
        num_devices=asked.mesh.num_devices,
        dtype=asked.dtype,
        max_len=asked.max_len,
        page_size=asked.engine.page_size,
        pages_per_row=asked.pages_per_row,
        rows_asked=asked.rows,
        fits=fits,
        hbm_capacity_bytes=capacity,
        weights_bytes=asked.weights_bytes,
        page_bytes=asked.page_bytes,
        counted_bytes=counted,
        window=None if found is None else report_window(asked, found),
    )


def rows_by_pages(asked: EngineDeployment, free_bytes: int) -> int:
    """Return how many of the longest texts so many bytes hold, were there nothing but pages."""
    return max(0, free_bytes // asked.page_bytes - 1) // asked.pages_per_row * asked.mesh.data


def fitting(asked: EngineDeployment, compiled: Callable[[int], CompiledProgram], rows: int) -> Found | None:
    """Return the window of so many rows, None if it does not fit."""
    try:
        program = compiled(rows)
    except DoesNotFit:
        return None
    return Found(rows, program) if program.total_bytes <= asked.chip.device_hbm_bytes else None


def most_rows(
    compiled: Callable[[int], CompiledProgram], capacity: int, weights: int, first: int, parts: int = 1
) -> Found | None:
    """Return the most rows that the compiler accepts and that split into equal ``parts``, from the ``first`` guess on.

    Fewer rows than parts need not split. What a number of rows needs beyond the weights predicts what others need:
    nearly all of it is proportional to them.
    """

    def even(rows: int) -> int:
        return rows // parts * parts or rows

    best: Found | None = None
    rows, refused = even(first), None
    for _ in range(_TRIES):
        if rows < 1 or (best is not None and rows <= best.rows):
            break
        try:
            program = compiled(rows)
            needed = program.total_bytes
        except DoesNotFit as error:
            program, needed = None, max(error.required_bytes or 0, capacity + 1)
        if program is not None and needed <= capacity:
            best = Found(rows, program)
        else:
            refused = rows
        guess = int(rows * (capacity - weights) / max(1, needed - weights))
        rows = even(guess if refused is None else min(guess, refused - 1))
    return best and best._replace(refused=refused)


def report_window(asked: EngineDeployment, found: Found) -> WindowReport:
    """Report on a step of a compiled window."""
    rows, program = found.rows, found.program
    work = step_work(program.instructions(), asked.engine.steps_per_look, asked.topology)
    times = roofline(work, asked.chip, asked.dtype)
    pool, rest = program.cache_bytes, program.total_bytes - program.cache_bytes
    pages, each = (asked.chip.device_hbm_bytes - rest) // asked.page_bytes, asked.rows_each(rows)
    if found.refused is not None:
        pages = min(pages, asked.pages_for(found.refused) - 1)
    return WindowReport(
        rows=rows,
        pages=pages,
        pool_bytes=pool,
        total_bytes=program.total_bytes,
        temporaries_bytes=program.temporary_bytes,
        temporaries_share=program.temporary_bytes / pool,
        pools_in_place=program.alias_bytes >= pool,
        pages_in_place=_IN_PLACE in program.hlo,
        hbm_bytes=work.hbm_bytes,
        floor_bytes=asked.read_by(each) + each * asked.pages_per_row * asked.page_bytes,
        flops=work.flops,
        collectives={kind: {"count": count, "bytes": size} for kind, (count, size) in work.collectives.items()},
        sent_bytes=work.sent_bytes,
        hbm_seconds=times.hbm_seconds,
        mxu_seconds=times.mxu_seconds,
        ici_seconds=times.ici_seconds,
        latency_seconds=times.latency_seconds,
        roofline_seconds=times.seconds,
        bound=times.bound,
        tokens_per_second=rows / times.seconds,
        tokens_per_second_per_row=1 / times.seconds,
        compile_seconds=program.compile_seconds,
    )


def step_work(instructions: list[Instruction], steps: int, topology: str) -> Work:
    """Return the work of one of a window's ``steps``, with its share of what the window does once.

    The loop over steps is counted as one run. Collectives are counted and named inside it alone.
    """
    step = total(found for found in instructions if found.loops)
    once = total(found for found in instructions if not found.loops)
    inside = Work(step.hbm_bytes, step.flops, step.sent_bytes, step.collectives, count_hops(step.groups, topology))
    return replace(
        inside,
        hbm_bytes=step.hbm_bytes + once.hbm_bytes // steps,
        flops=step.flops + once.flops // steps,
        sent_bytes=step.sent_bytes + once.sent_bytes // steps,
        hops=inside.hops + count_hops(once.groups, topology) // steps,
    )


def _counted(asked: EngineDeployment, rows: int) -> int:
    return asked.weights_bytes + asked.pages_for(rows) * asked.page_bytes
