"""Puts an engine's parts together: a core with its scheduler, its pages and its device."""

from collections.abc import Callable, Sequence

from jaxinfer.decoding.fixed_rows import step_headroom
from jaxinfer.decoding.programs import Programs
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.engine.config import EngineConfig
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.device import Device
from jaxinfer.engine.kept_pace import KeptPace
from jaxinfer.engine.memory import count_pages
from jaxinfer.engine.pages import PagePool
from jaxinfer.engine.prefixes import PrefixIndex
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.errors import InvalidOption
from jaxinfer.notation import Params


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
) -> EngineCore:
    """Return an engine's core for texts of up to ``max_len`` tokens; ``strategy`` is resolved.

    If it ``rounds_up``, larger programs run until those that fit are compiled (`Device`).
    """
    decoder = programs.decoder
    headroom = step_headroom(strategy, decoder.backend)
    num_slots, rows_each = max_len + headroom, strategy.rows_per_prompt or 1
    strategy.check_slots(num_slots)
    num_pages = count_pages(config, decoder, num_slots, len(strategy.features))
    if config.max_rows < rows_each:
        raise InvalidOption(
            f"engine: max_rows={config.max_rows} is less than the width={rows_each} rows of a beam search"
        )
    make_device, make = _kinds(strategy)
    device = make_device(
        programs,
        params,
        strategy,
        num_rows=config.max_rows // rows_each,
        num_slots=num_slots,
        num_pages=num_pages,
        page_size=config.page_size,
        most_steps=config.steps_per_look,
        chunk=config.prefill_chunk,
        eos_token_ids=eos_token_ids,
        rounds_up=rounds_up,
    )
    pool = PagePool(num_pages)
    scheduler = Scheduler(
        config,
        pool,
        PrefixIndex(pool, config.page_size),
        tokens_per_step=strategy.max_depth + 1,
        headroom=headroom,
        # Where a token's keys have the same bits whoever computes them, answers are as good as prompts.
        shares_answers=config.prefix_cache == "all" or decoder.backend.keeps_bits,
        rows_each=rows_each,
    )
    kept_pace = KeptPace(programs) if kept_pace is None else kept_pace
    core = make(decoder.config, device, scheduler, frozenset(eos_token_ids), clock, kept_pace)
    scheduler.preempt = core.preempt
    return core


def _kinds(strategy: Strategy) -> tuple[type[Device], type[EngineCore]]:
    """Return what runs a strategy's sequences."""
    if strategy.rows_per_prompt is None:
        return Device, EngineCore
    # Imported here: other strategies need nothing of it.
    from jaxinfer.engine.beam_core import BeamCore
    from jaxinfer.engine.beam_device import BeamDevice

    return BeamDevice, BeamCore
