"""Compiles a function for a TPU that is not attached, and reads the compiler's schedule.

A TPU has no caches and no out-of-order execution: the compiler decides what every unit does in every cycle, including
waits for results. `scalar_unit` follows the kernel's control flow, so cycles are counted, not sampled. Waits for memory
are not counted: compare the time of the cycles with the time of the bytes.
"""

import glob
import os
import pickle
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import jax
import numpy as np

from pallas_kernels.bundles import read_bundles
from pallas_kernels.chips import CHIPS, Chip
from pallas_kernels.scalar_operands import kernel_operands
from pallas_kernels.scalar_unit import ScheduleError, run_scalar_unit

_DUMP_FLAGS = (
    "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_emit_annotations=true --xla_jf_debug_level=2 "
    "--xla_jf_dump_llo_pass_label_regex=packed-bundles-post-ra|pre-delay"
)
_BRANCH_SLOTS = {"v4": 1, "tpu7x": 6}  # bundles that run after a branch; 4 on the others
_NAME = re.compile(r"^\d+-(.+)-\d+-packed-bundles-post-ra\.txt$")
_COPY = re.compile(r"= \((\w+)\[([\d,]*)\]\{([^}]*)\}, (\w+)\[[\d,]*\]\{([^}]*)\}.*\) copy-start\(", re.MULTILINE)
_ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "s16": 2, "f32": 4, "s32": 4}


@dataclass(frozen=True)
class Loop:
    """A loop of a kernel that ran ``runs`` times; a full iteration has ``cycles``, of which ``bundles`` are not empty.

    ``depth`` is 1 for the outermost loop, the grid. The cycles of an outer loop count its inner loops once.
    """

    depth: int
    start: int
    cycles: int
    bundles: int
    runs: int


@dataclass(frozen=True)
class Block:
    """Bundles that run together: ``cycles`` of them, ``runs`` times; a skipped block runs less often than its loop."""

    start: int
    cycles: int
    runs: int


@dataclass(frozen=True)
class Operation:
    """The schedule of one operation of a program, such as one kernel.

    ``cycles`` counts those that ran, and ``bundles`` those that issued something, on the slower core if a device has
    two. ``hbm_bytes`` is the HBM traffic of its copies. ``slots`` is the share of each unit's issue slots in use, over
    all cycles (MXU XLU VALU VPOP EUP VLOAD VLOAD:FILL VSTORE VSTORE:SPILL SALU).
    """

    name: str
    cycles: int
    bundles: int
    hbm_bytes: int
    slots: Mapping[str, float]
    loops: tuple[Loop, ...]
    blocks: tuple[Block, ...]

    @property
    def grid_steps(self) -> int:
        """How often the outermost loop ran: the grid's steps, and those that fill and drain its pipeline."""
        return max((loop.runs for loop in self.loops if loop.depth == 1), default=1)

    @property
    def step_bundles(self) -> int:
        """The bundles of one full step of the grid."""
        return max((loop.bundles for loop in self.loops if loop.depth == 1), default=self.bundles)

    @property
    def busiest(self) -> Block:
        """The block that took most of the cycles; its runs are the steps that were not skipped."""
        return max(self.blocks, key=lambda block: block.cycles * block.runs)


@dataclass(frozen=True)
class Schedule:
    """The schedules of a program's operations, each counted once, and the compiler's memory analysis.

    ``hbm_bytes`` is the program's HBM traffic, including copies between operations.
    """

    chip: str
    operations: tuple[Operation, ...]
    hbm_bytes: int
    temporary_bytes: int
    peak_bytes: int
    argument_bytes: int

    @property
    def cycles(self) -> int:
        """The cycles of all operations, without waits for memory."""
        return sum(operation.cycles for operation in self.operations)

    @property
    def compute_seconds(self) -> float | None:
        """The time of the cycles, or None if the chip's clock is not published."""
        clock = CHIPS[self.chip].clock_hz
        return self.cycles / clock if clock else None

    @property
    def memory_seconds(self) -> float:
        """The time of the bytes at the chip's bandwidth."""
        return self.hbm_bytes / CHIPS[self.chip].device_hbm_bytes_per_second

    @property
    def seconds(self) -> float | None:
        """The longer of the two times, as if it hid the other."""
        return None if self.compute_seconds is None else max(self.compute_seconds, self.memory_seconds)


class Compiler(AbstractContextManager["Compiler"]):
    """A process that compiles for one kind of TPU: use it as a context, for any number of schedules."""

    def __init__(self, chip: str) -> None:
        if chip not in CHIPS:
            raise ValueError(f"unknown TPU {chip!r}: choose one of {', '.join(CHIPS)}")
        self.chip = CHIPS[chip]
        self._folder = tempfile.mkdtemp(prefix="schedule-")
        self._pool: ProcessPoolExecutor | None = None

    def schedule(
        self, function: Callable[..., Any], arguments: Sequence[Any], *, donated: tuple[int, ...] = (), **options: Any
    ) -> Schedule:
        """Compile ``function(*arguments, **options)`` and read its schedule; ``donated`` arguments may be overwritten.

        The function must pickle: use a function of a module, or a `functools.partial` of one. An argument is a NumPy
        array if its values decide what runs (lengths, block tables), else a `jax.ShapeDtypeStruct`. Raise
        ScheduleError, with the compiler's reason, if it refuses, or if the control flow depends on data.
        """
        described = [
            argument if isinstance(argument, np.ndarray) else (tuple(argument.shape), np.dtype(argument.dtype).name)
            for argument in arguments
        ]
        try:
            job = pickle.dumps((function, described, donated, options))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ScheduleError(f"cannot send {function!r} to the compiling process: define it in a module") from error
        pool = self._pool or self._start()
        try:
            return pool.submit(_compile_job, job, self.chip, self._folder).result()
        except BrokenProcessPool as error:
            self._pool = None
            raise ScheduleError(f"the compiler died on {function!r}") from error

    def _start(self) -> ProcessPoolExecutor:
        # libtpu reads its flags once per process, and JAX's threads do not survive a fork.
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), _prepare_process, (self._folder,))
        return self._pool

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


def compile_schedule(function: Callable[..., Any], arguments: Sequence[Any], chip: str, **options: Any) -> Schedule:
    """Compile one function for a chip and read its schedule: see `Compiler.schedule`."""
    with Compiler(chip) as compiler:
        return compiler.schedule(function, arguments, **options)


def _prepare_process(folder: str) -> None:
    os.environ.update(
        JAX_PLATFORMS="cpu",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE="v5litepod-4",  # any value, for all chips: without it libtpu warns
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        LIBTPU_INIT_ARGS=_DUMP_FLAGS.format(folder=folder),
    )
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)


def _compile_job(job: bytes, chip: Chip, folder: str) -> Schedule:
    function, described, donated, options = pickle.loads(job)
    for path in glob.glob(f"{folder}/*"):
        os.remove(path)
    mesh, placed = _single_device(chip)
    arguments = [
        jax.ShapeDtypeStruct(
            *((argument.shape, argument.dtype) if isinstance(argument, np.ndarray) else argument), sharding=placed
        )
        for argument in described
    ]

    def call(*arguments: Any) -> Any:
        return function(*arguments, **options)

    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = jax.jit(call, donate_argnums=donated).trace(*arguments)
            compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    except Exception as error:  # The compiler's errors are of many classes, some of which do not pickle.
        raise ScheduleError(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from None
    hlo = compiled.as_text() or ""
    known = [argument if isinstance(argument, np.ndarray) else None for argument in described]
    operands = kernel_operands(traced.jaxpr, known, hlo)
    operations = tuple(_read_operation(path, operands, chip) for path in _dumped(folder))
    memory: Any = compiled.memory_analysis()
    return Schedule(
        chip.name,
        operations,
        sum(operation.hbm_bytes for operation in operations) + _copied_bytes(hlo),
        memory.temp_size_in_bytes,
        memory.peak_memory_in_bytes,
        memory.argument_size_in_bytes,
    )


def _single_device(chip: Chip) -> tuple[jax.sharding.Mesh, jax.sharding.SingleDeviceSharding]:
    from jax.experimental import topologies

    extra: dict[str, Any] = {"chip_config_name": "megacore"} if chip.cores > chip.devices else {}
    topology = topologies.get_topology_desc(
        f"{chip.name}:{chip.single}", platform="tpu", chips_per_host_bounds=(1, 1, 1), **extra
    )
    device = topology.devices[0]
    return jax.sharding.Mesh(np.array([device]), ("x",)), jax.sharding.SingleDeviceSharding(device)


def _dumped(folder: str) -> list[str]:
    """Return the files of the program's operations, without the program's frame, start and end."""
    paths = []
    for path in sorted(glob.glob(f"{folder}/*-packed-bundles-post-ra.txt")):
        found = _NAME.match(os.path.basename(path))
        if found and found[1] != "TLP" and not found[1].startswith("<") and "schedule-analysis" not in path:
            paths.append(path)
    return paths


def _read_operation(path: str, operands: Mapping[str, Sequence[np.ndarray | None]], chip: Chip) -> Operation:
    found = _NAME.match(os.path.basename(path))
    assert found is not None
    name = found[1]
    with open(path) as file:
        bundles = read_bundles(file.read())
    branch_slots = _BRANCH_SLOTS.get(chip.name, 4)
    granule_bytes = 512 if chip.name == "v4" else 32
    shared = any(operation.opcode == "core.id" for bundle in bundles for operation in bundle.operations)
    try:
        runs = [
            run_scalar_unit(bundles, operands.get(name, ()), branch_slots, granule_bytes, core)
            for core in range(chip.cores // chip.devices if shared else 1)
        ]
    except ScheduleError as error:
        raise ScheduleError(f"{name}: {error}") from None
    # The cores of a device work at the same time, on separate steps.
    run = max(runs, key=lambda run: sum((run.ends[start] - start) * count for start, count in run.counts.items()))
    usage, capacity = _read_usage(path, name, len(bundles))
    blocks = tuple(Block(start, run.ends[start] - start, count) for start, count in sorted(run.counts.items()))
    cycles = sum(block.cycles * block.runs for block in blocks)
    issued = np.array([not bundle.empty for bundle in bundles], np.int64)
    used = np.sum([usage[block.start : block.start + block.cycles].sum(0) * block.runs for block in blocks], axis=0)
    loops = []
    spans = [
        (operation.target, address + 1 + branch_slots)
        for address, bundle in enumerate(bundles)
        for operation in bundle.operations
        if operation.target is not None and operation.target <= address
    ]
    for start, end in sorted(spans):
        depth = sum(outer[0] <= start and end <= outer[1] for outer in spans)
        loops.append(Loop(depth, start, end - start, int(issued[start:end].sum()), run.counts.get(start, 0)))
    slots = {unit: float(count) / (size * max(cycles, 1)) for (unit, size), count in zip(capacity.items(), used)}
    ran = sum(int(issued[block.start : block.start + block.cycles].sum()) * block.runs for block in blocks)
    return Operation(name, cycles, ran, sum(run.hbm_bytes for run in runs), slots, tuple(loops), blocks)


def _read_usage(path: str, name: str, num_bundles: int) -> tuple[np.ndarray, dict[str, int]]:
    """Return the issue slots of each unit that each bundle uses, and the number of slots of each unit."""
    stamp = os.path.basename(path).partition("-")[0]
    beside = glob.escape(f"{os.path.dirname(path)}/{stamp}-{name}-")
    (usage_path,) = glob.glob(f"{beside}*-pre-delay_hlo-static-per-bundle-utilization.txt")
    with open(usage_path) as file:
        _, units, sizes, _, *rows = file.read().splitlines()
    usage = np.array([row.split() for row in rows[:num_bundles]], np.int64)
    if len(usage) != num_bundles:
        raise ScheduleError(f"{name} has {num_bundles} bundles, but the use of {len(usage)}")
    return usage, dict(zip((unit.strip() for unit in units.split(",")), map(int, sizes.split())))


def _copied_bytes(hlo: str) -> int:
    """Return the HBM traffic of copies between operations."""
    total = 0.0
    for dtype, shape, source, _, target in _COPY.findall(hlo):
        size = float(np.prod([int(length) for length in shape.split(",") if length])) * _ITEM_BYTES.get(dtype, 4)
        total += size * sum("S(" not in layout for layout in (source, target))
    return int(total)
