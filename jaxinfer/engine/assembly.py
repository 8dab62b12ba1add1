"""Puts an engine's parts together: a core with its scheduler, its pages and its device."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxinfer.cache.layouts import PagedLayout
from jaxinfer.decoding.fixed_rows import step_headroom
from jaxinfer.decoding.programs import Programs
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.engine.config import EngineConfig
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.device import Device
from jaxinfer.engine.held_pages import HeldPages
from jaxinfer.engine.kept_pace import KeptPace
from jaxinfer.engine.led_device import Follower, LedDevice
from jaxinfer.engine.memory import count_pages
from jaxinfer.engine.pages import PagePool
from jaxinfer.engine.prefixes import PrefixIndex
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.errors import InvalidOption
from jaxinfer.models.decoder import Decoder
from jaxinfer.notation import EXPERT, Params
from jaxinfer.ops.backend import Backend
from jaxinfer.parallel.groups import held_by, is_led_here, own_groups, processes_of
from jaxinfer.parallel.held import HeldPartitioner
from jaxinfer.parallel.messages import Receiver, Sender
from jaxinfer.parallel.partitioner import Partitioner

# How many engines this process has made that run with other processes, by their devices.
_made: Counter[str] = Counter()


class GroupModel(NamedTuple):
    """A model as one of ``num_groups`` groups of devices has it, and a strategy that is resolved for it."""

    programs: Programs
    params: Params
    strategy: Strategy
    num_groups: int = 1


def group_models(
    programs: Programs, params: Params, adapted: Params, resolve: Callable[[Partitioner, Params], Strategy]
) -> list[GroupModel]:
    """Return a model's part on each group of this process's devices; ``adapted`` are its parameters with adapters'."""
    groups, decoder, mesh = own_groups(programs.partitioner), programs.decoder, programs.partitioner.mesh
    if groups == (programs.partitioner,) and (mesh is None or mesh.shape[EXPERT] == 1):
        return [GroupModel(programs, adapted, resolve(groups[0], params))]
    return [
        GroupModel(
            Programs(
                Decoder(decoder.config, _beside_pages(replace(decoder.backend, mesh=on.mesh))),
                programs.layout,
                on,
                programs.kept,
            ),
            held_by(on, adapted),
            _beside_pages(resolve(on, held_by(on, params))),
            programs.partitioner.data,
        )
        for on in groups
    ]


def make_cores(
    groups: Sequence[GroupModel], config: EngineConfig, on_follower_end: Callable[[], None], **options: Any
) -> tuple[list[EngineCore], list[Follower]]:
    """Return a core for each group that this process leads, and a follower for each other one.

    Each has its part of the rows and of the pages. ``options`` as for `make_core`.
    """

    def part(whole: int) -> int:
        return -(-whole // groups[0].num_groups)

    pages = None if config.pages is None else part(config.pages)
    own = replace(config, max_rows=part(config.max_rows), pages=pages)
    cores: list[EngineCore] = []
    followers: list[Follower] = []
    try:
        for group in groups:
            partitioner = HeldPartitioner(group.programs.partitioner.mesh)
            partitioner.check_axes()
            paged = Programs(group.programs.decoder, PagedLayout(config.page_size), partitioner, group.programs.kept)
            params, strategy = group.params, group.strategy
            if not partitioner.is_multi_process:
                cores.append(make_core(paged, params, strategy, own, rounds_up=True, num_groups=len(groups), **options))
                continue
            if strategy.keeps_file:
                raise InvalidOption(
                    f"engine: strategy {strategy.name} has a file, which is of one process: leave it out"
                )
            assert partitioner.mesh is not None
            leader, *others = processes_of(partitioner.mesh)
            name = _next_name(partitioner.mesh)
            if is_led_here(partitioner):
                tell = Sender(name, others).send
                cores.append(_led_core(paged, params, strategy, own, num_groups=len(groups), tell=tell, **options))
            else:
                sizes = _Sizes(paged, strategy, own, options["max_len"], options["eos_token_ids"])
                make_device = partial(sizes.make_device, params, rounds_up=False)
                followers.append(Follower(make_device, Receiver(name).receive, on_follower_end, leader=leader))
    except BaseException:
        for core in cores:
            core.drop_device()
        for follower in followers:
            follower.abandon()
        raise
    return cores, followers


def _next_name(mesh: Mesh) -> str:
    """Return a name for a group's messages. Its processes make their engines on these devices in the same order."""
    devices = "-".join(str(device.id) for device in mesh.devices.flat)
    _made[devices] += 1
    return f"jaxinfer/engine/{devices}/{_made[devices]}"


def _led_core(*arguments: Any, tell: Callable[[Any], None], **options: Any) -> EngineCore:
    try:
        return make_core(*arguments, tell=tell, **options)
    except BaseException:
        # The followers wait for the number of pages.
        tell(None)
        raise


def warm_up(cores: Sequence[EngineCore], progress: Callable[[int, int], None]) -> None:
    """Read or compile all programs of all cores at the same time; ``progress`` gets how many are done, and of all."""
    if len(cores) == 1:
        cores[0].warm_up(progress)
        return
    done, lock = [(0, 0)] * len(cores), threading.Lock()

    def note(place: int, count: int, total: int) -> None:
        with lock:
            done[place] = count, total
            counts, totals = zip(*done, strict=True)
            # The others' number is not known before they begin, and is the same.
            progress(sum(counts), max(totals) * len(cores))

    with ThreadPoolExecutor(len(cores)) as pool:
        for future in [pool.submit(core.warm_up, partial(note, place)) for place, core in enumerate(cores)]:
            future.result()


def make_core(
    programs: Programs,
    params: Params,
    strategy: Strategy,
    config: EngineConfig,
    *,
    max_len: int,
    eos_token_ids: Sequence[int],
    clock: Callable[[], float],
    rounds_up: bool = False,
    kept_pace: KeptPace | None = None,
    num_groups: int = 1,
    tell: Callable[[Any], None] | None = None,
) -> EngineCore:
    """Return an engine's core for texts of up to ``max_len`` tokens; ``strategy`` is resolved.

    If it ``rounds_up``, larger programs run until those that fit are compiled (`Device`). It is one of ``num_groups``,
    which share the memory of a host's CPUs. ``tell`` sends a message to the processes that follow this one, if any.
    """
    decoder = programs.decoder
    sizes = _Sizes(programs, strategy, config, max_len, eos_token_ids)
    rows_each = strategy.rows_per_prompt or 1
    strategy.check_slots(sizes.num_slots)
    num_pages = count_pages(config, decoder, sizes.num_slots, len(strategy.features), num_groups)
    if config.max_rows < rows_each:
        of_each = f" in each of {num_groups} groups of devices" if num_groups > 1 else ""
        raise InvalidOption(
            f"engine: max_rows={config.max_rows}{of_each} is less than the width={rows_each} rows of a beam search"
        )
    device = sizes.make_device(params, num_pages, rounds_up=rounds_up)
    if tell is not None:
        # What is free differs from process to process.
        tell(num_pages)
        device = LedDevice(device, tell)
    pool = PagePool(num_pages)
    held = HeldPages(
        config,
        pool,
        PrefixIndex(pool, config.page_size),
        headroom=sizes.headroom,
        # Where a token's keys have the same bits whoever computes them, answers are as good as prompts.
        shares_answers=config.prefix_cache == "all" or decoder.backend.keeps_bits,
        rows_each=rows_each,
    )
    scheduler = Scheduler(config, held, tokens_per_step=strategy.max_depth + 1)
    kept_pace = KeptPace(programs) if kept_pace is None else kept_pace
    core = _kinds(strategy)[1](decoder.config, device, scheduler, frozenset(eos_token_ids), clock, kept_pace)
    scheduler.preempt = core.preempt
    return core


class _Sizes(NamedTuple):
    """What a device's shapes follow from, besides its pages."""

    programs: Programs
    strategy: Strategy
    config: EngineConfig
    max_len: int
    eos_token_ids: Sequence[int]

    @property
    def headroom(self) -> int:
        """The slots that a step writes past a text."""
        return step_headroom(self.strategy, self.programs.decoder.backend)

    @property
    def num_slots(self) -> int:
        """The slots of the longest text."""
        return self.max_len + self.headroom

    def make_device(self, params: Params, num_pages: int, *, rounds_up: bool) -> Device:
        """Return a device with so many pages."""
        config = self.config
        return _kinds(self.strategy)[0](
            self.programs,
            params,
            self.strategy,
            num_rows=config.max_rows // (self.strategy.rows_per_prompt or 1),
            num_slots=self.num_slots,
            num_pages=num_pages,
            page_size=config.page_size,
            most_steps=config.steps_per_look,
            chunk=config.prefill_chunk,
            eos_token_ids=self.eos_token_ids,
            rounds_up=rounds_up,
        )


def _beside_pages(node: Any) -> Any:
    """Return a backend, or a strategy with those of its drafters, of which no axis but ``data`` splits rows.

    Pages are of any row, so every device of a group has all of its rows.
    """
    if isinstance(node, Backend):
        return replace(node, rows_over_experts=False)
    if isinstance(node, tuple):
        return tuple(map(_beside_pages, node)) if any(isinstance(each, Strategy) for each in node) else node
    if not isinstance(node, Strategy):
        return node
    given = {each.name: getattr(node, each.name) for each in fields(node) if each.init}
    changed = {name: _beside_pages(value) for name, value in given.items()}
    changed = {name: value for name, value in changed.items() if value is not given[name]}
    return replace(node, **changed) if changed else node


def _kinds(strategy: Strategy) -> tuple[type[Device], type[EngineCore]]:
    """Return what runs a strategy's sequences."""
    if strategy.rows_per_prompt is None:
        return Device, EngineCore
    # Imported here: other strategies need nothing of it.
    from jaxinfer.engine.beam_core import BeamCore
    from jaxinfer.engine.beam_device import BeamDevice

    return BeamDevice, BeamCore
