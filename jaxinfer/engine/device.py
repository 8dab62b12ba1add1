"""The device's side of an engine: pools of pages, rows, and the compiled programs that work on them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.slots import slots_for
from jaxinfer.decoding.programs import Programs
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.engine.programs import (
    Pools,
    Report,
    Rows,
    compute_chunk,
    copy_page,
    enter,
    read_pages,
    read_row,
    run_window,
    start_drafting,
    write_pages,
    write_row,
)
from jaxinfer.engine.row_axes import row_axes, with_rows
from jaxinfer.engine.shapes import (
    ANY_ENTRY,
    Entry,
    described,
    described_pools,
    described_rows,
    described_window,
    integers,
    levels_from,
    powers_from,
    state_of,
    table,
)
from jaxinfer.engine.undrafted import Undrafted
from jaxinfer.grammar.table import TokenTable
from jaxinfer.notation import Params
from jaxinfer.ops.backend import Backend
from jaxinfer.parallel.held import HeldPartitioner
from jaxinfer.parallel.host_parts import along
from jaxinfer.sampling.arrays import NO_TOKEN, SamplingArrays, sampling_arrays
from jaxinfer.sampling.params import SamplingParams

# Chunks are padded to powers of two from here on.
_LEAST_CHUNK = 16


UNDRAFTED = Undrafted()


@dataclass(frozen=True)
class Shaped:
    """A program for certain shapes: what `Programs.run` takes, with arrays described."""

    name: Any
    function: Callable[..., Any]
    donated: tuple[int, ...]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Saved:
    """A sequence that had to make room: the content of its pages and its row, in the host's memory."""

    pages: Any
    row: Any


def by_nodes(strategy: Strategy, backend: Backend) -> dict[int, Strategy]:
    """Return what may decode a window, by nodes a step, which ascend; all keep a row's memory for each other.

    Fewer nodes than a strategy has are for where rows cost time, or for what adapts: of many texts they do on any chip.
    More nodes are a model's that decodes ahead.
    """
    drafts = strategy.max_depth > 0
    takes_turns = drafts and strategy.exactness == "identical" and (strategy.adapts or not backend.has_free_rows)
    narrower = strategy.narrower if takes_turns else ()
    wider = (strategy.ahead,) if takes_turns and strategy.ahead is not None else ()
    undrafted: dict[int, Strategy] = {1: UNDRAFTED} if drafts else {}
    return undrafted | {each.num_nodes: each for each in (*reversed(narrower), strategy, *wider)}


class Device:
    """Runs one thing after the other; only one thread may call it.

    ``num_slots`` is the longest text with what a step writes past it. Prompts come in chunks of at most ``chunk``
    tokens. All rows begin empty. If it ``rounds_up``, only the largest program of each kind is waited for; smaller ones
    are compiled in the background, and larger ones run meanwhile.
    """

    def __init__(
        self,
        programs: Programs,
        params: Params,
        strategy: Strategy,
        *,
        num_rows: int,
        num_slots: int,
        num_pages: int,
        page_size: int,
        most_steps: int,
        chunk: int,
        eos_token_ids: Sequence[int],
        rounds_up: bool = False,
    ) -> None:
        self._chunk, self._rounds_up = chunk, rounds_up
        self._programs, self._params, self.strategy = programs, params, strategy
        self._partitioner = HeldPartitioner(programs.partitioner.mesh)
        self._num_rows, self._page_size, self._num_pages = num_rows, page_size, num_pages
        self._num_slots = slots_for(num_slots)
        self._columns = -(-num_slots // page_size)
        self._eos_token_ids = tuple(eos_token_ids)
        self._most_steps = most_steps
        # Whether there are drafts, and whether the text is the same without them.
        self.drafts = strategy.max_depth > 0
        self.may_rest = self.drafts and strategy.exactness == "identical"
        self.strategies = by_nodes(strategy, programs.decoder.backend)
        self._widths = self._sampling_widths([SamplingParams()])
        self._entry_shapes = described(self._state_of(ANY_ENTRY))
        self._descriptions: dict[Any, Rows] = {}
        self._axes = row_axes(self._described)
        self.reset()

    def reset(self) -> None:
        """Begin with empty rows and pools."""
        config, backend = self._programs.decoder.config, self._programs.decoder.backend
        pools = described_pools(config, backend, self._num_pages, self._page_size, self.strategy.features)
        held = pools, with_rows(self._described(2), self._axes, self._num_rows)
        made = self._partitioner.create(lambda: jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), held))
        self._pools: Pools = made[0]
        self._rows: Rows = made[1]
        self._held_shapes = self._placed(described((self._pools, self._rows)))

    def drop(self) -> None:
        """Let go of pools and rows; `reset` makes them anew."""
        del self._pools, self._rows

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Read or compile every program, the largest ones first; ``progress`` gets how many are done, and of how many.

        Those that move sequences which make room are not among them.
        """
        columns = self._columns_from(1)
        everything = [
            self._shaped_copy(),
            *(
                self._shaped_window(strategy, size, wide)
                for strategy in reversed(self.strategies.values())
                for wide in reversed(columns)
                for size in reversed(self._sizes(1))
            ),
            *(self._shaped_chunk(size, wide) for wide in reversed(columns) for size in reversed(self._chunks(1))),
            *(
                shaped(tokens, wide)
                for shaped in (self._shaped_enter, *([self._shaped_start] if self.drafts else []))
                for wide in reversed(columns)
                for tokens in self._texts_within(wide)
            ),
        ]
        for done, one in enumerate(everything):
            progress(done, len(everything))
            self._programs.prepare(one.name, one.function, one.donated, *one.arguments)
        progress(len(everything), len(everything))

    @property
    def compile_seconds(self) -> float:
        """The seconds that calls have waited for programs."""
        return self._programs.compile_seconds

    @property
    def is_preparing(self) -> bool:
        """Whether a program is being compiled in the background, which takes cores from what runs."""
        return self._programs.is_preparing

    @property
    def compilations(self) -> int:
        """How many programs were compiled."""
        return self._programs.compilations

    def compute(
        self, tokens: Sequence[int], start: int, pages: Sequence[int], context_length: int, adapter: int = 0
    ) -> Any:
        """Write tokens from slot ``start`` on to a sequence's pages; return the last one's hidden state."""
        shapes = list(product(self._chunks(len(tokens)), self._columns_from(len(pages))))
        size, columns = self._pick(self._shaped_chunk, shapes)
        tokens_1T = np.zeros((1, size), np.int32)
        tokens_1T[0, : len(tokens)] = tokens
        numbers = tuple(map(np.int32, (start, len(tokens), context_length, adapter)))
        program = self._shaped_chunk(size, columns)
        arguments = self._params, self._pools, table([pages], columns), tokens_1T, *numbers
        self._pools, hidden_1D = self._run(program, *arguments)
        return hidden_1D

    def copy_page(self, source: int, target: int) -> None:
        """Make one page's content another's too."""
        self._pools = self._run(self._shaped_copy(), self._pools, np.int32(source), np.int32(target))

    def enter(self, slot: int, pages: Sequence[int], hidden_1D: Any, entry: Entry) -> Report:
        """Put a sequence into a row; the report has the token that it drew, if it does."""
        self._make_room_for(entry.sampling)
        shapes = list(product(self._texts(len(entry.tokens)), self._columns_from(len(pages))))
        num_tokens, columns = self._pick(self._shaped_enter, shapes)
        arguments = (
            self._params,
            self.strategy.parameters,
            self._pools,
            self._rows,
            np.int32(slot),
            table([pages], columns),
            self._partitioner.from_host(self._state_of(entry)),
            hidden_1D,
            np.bool_(entry.draws),
        )
        self._pools, self._rows, report = self._run(self._shaped_enter(num_tokens, columns), *arguments)
        return self._partitioner.to_host(report)

    def start_drafting(self, slot: int, pages: Sequence[int], num_tokens: int) -> None:
        """Begin a row's drafts anew, after windows without; it has so many tokens."""
        shapes = list(product(self._texts(num_tokens), self._columns_from(len(pages))))
        spanned, columns = self._pick(self._shaped_start, shapes)
        arguments = np.int32(slot), table([pages], columns)
        held = self._params, self.strategy.parameters, self._pools, self._rows
        self._rows = self._run(self._shaped_start(spanned, columns), *held, *arguments)

    def ready_nodes(self, num_rows: int, num_pages: int) -> list[int]:
        """Return the numbers of nodes for which a window need not wait for its program.

        Programs for the others are prepared in the background. If there is none yet, plain steps are waited for: they
        take least to compile, and lose least.
        """
        if not self._rounds_up:
            return list(self.strategies)
        shapes = self._window_shapes(num_rows, num_pages)
        programs = {
            nodes: [self._shaped_window(strategy, *shape) for shape in shapes]
            for nodes, strategy in self.strategies.items()
        }
        ready = [
            nodes
            for nodes, each in programs.items()
            if any(self._programs.is_ready(one.name, *one.arguments) for one in each)
        ]
        for nodes, (best, *_) in programs.items() if ready else ():
            if nodes not in ready:
                self._programs.prepare_soon(best.name, best.function, best.donated, *best.arguments)
        return ready or [min(self.strategies)]

    def start(
        self, slots: Sequence[int], pages: Sequence[Sequence[int]], max_steps: int, nodes: int | None = None
    ) -> Report:
        """Begin to decode rows until one ends, at most so many steps; what `read` waits for has them in this order.

        Then come those that pad. Steps verify ``nodes`` nodes, one of `strategies` (None: the most). With one node,
        rows keep what `start_drafting` needs. The next window may start before this one is read; if a row ends in this
        one, that one does nothing.
        """
        strategy = self.strategy if nodes is None else self.strategies[nodes]
        shapes = self._window_shapes(len(slots), max(map(len, pages)))
        size, columns = self._pick(partial(self._shaped_window, strategy), shapes)
        idle = [slot for slot in range(self._num_rows) if slot not in set(slots)][: size - len(slots)]
        arguments = (
            self._params,
            strategy.parameters,
            self._pools,
            self._rows,
            np.array([*slots, *idle], np.int32),
            table([*pages, *([] for _ in idle)], columns),
            np.arange(size) < len(slots),
            np.int32(max_steps),
        )
        self._pools, self._rows, report = self._run(self._shaped_window(strategy, size, columns), *arguments)
        return report

    def wait(self) -> None:
        """Wait until all that has been started is computed."""
        jax.block_until_ready((self._pools, self._rows))

    def read(self, report: Any) -> Any:
        """Wait for a window and return its report on the host."""
        return self._partitioner.to_host(report)

    def learn(self, answer: Sequence[int]) -> None:
        """Tell the strategy of an answer that has ended."""
        self.strategy.learn(answer)

    def save(self, slot: int, pages: Sequence[int]) -> Saved:
        """Copy a sequence's pages and row to the host."""
        return Saved(self.save_pages(pages), self.read_row(slot))

    def save_pages(self, pages: Sequence[int]) -> Any:
        """Copy the content of pages to the host."""
        content = self._programs.run("read_pages", read_pages, (), self._pools, self._padded(pages, 0))
        return jax.tree.map(
            lambda array: along(1, lambda part: part[:, : len(pages)], array), self._partitioner.to_host(content)
        )

    def read_row(self, slot: int) -> Rows:
        """Copy what the device holds of a row to the host."""
        name, function = self._row_name("read_row"), partial(read_row, self._axes)
        return self._partitioner.to_host(self._programs.run(name, function, (), self._rows, np.int32(slot)))

    def restore(self, slot: int, pages: Sequence[int], saved: Saved) -> None:
        """Put what `save` returned on other pages and into a row; there may be more pages than before."""
        places = self._padded(pages, self._num_pages)

        def padded(part: np.ndarray) -> np.ndarray:
            return np.pad(part, ((0, 0), (0, len(places) - part.shape[1]), (0, 0), (0, 0)))

        content = jax.tree.map(partial(along, 1, padded), saved.pages)
        content = self._partitioner.to_devices(content)
        self._pools = self._programs.run("write_pages", write_pages, (0,), self._pools, places, content)
        self.write_row(slot, saved.row)

    def write_row(self, slot: int, row: Rows) -> None:
        """Put what `read_row` returned into a row."""
        # Others may have needed longer lists since.
        row = row._replace(state=row.state._replace(sampling=widened(row.state.sampling, self._widths)))
        row = self._partitioner.to_devices(row)
        name, function = self._row_name("write_row"), partial(write_row, self._axes)
        self._rows = self._programs.run(name, function, (0,), self._rows, np.int32(slot), row)

    def _row_name(self, name: str) -> tuple[Any, ...]:
        """Return the name of a program of one row: where rows are in what a strategy remembers, no shape tells."""
        return name, *jax.tree.leaves(self._axes)

    def _pick(self, shaped: Callable[[int, int], Shaped], shapes: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Return the first shape that is ready, and have the first one of all prepared; the shapes grow."""
        if not self._rounds_up or len(shapes) == 1:
            return shapes[0]
        for shape in shapes:
            program = shaped(*shape)
            if self._programs.is_ready(program.name, *program.arguments):
                if shape != shapes[0]:
                    best = shaped(*shapes[0])
                    self._programs.prepare_soon(best.name, best.function, best.donated, *best.arguments)
                return shape
        # The largest one serves whatever comes next. Others would take cores from its compilation, for which all wait.
        return shapes[-1]

    def _run(self, program: Shaped, *arguments: Any) -> Any:
        return self._programs.run(program.name, program.function, program.donated, *arguments)

    def _shaped_copy(self) -> Shaped:
        return Shaped("copy_page", copy_page, (0,), (self._held_shapes[0], integers(), integers()))

    def _shaped_chunk(self, size: int, columns: int) -> Shaped:
        function = partial(compute_chunk, self._programs.decoder)
        numbers = [integers()] * 4
        pools, _ = self._held_shapes
        arguments = self._params, pools, integers(1, columns), integers(1, size), *numbers
        return Shaped(("chunk", size), function, (1,), arguments)

    def _shaped_enter(self, num_tokens: int, columns: int) -> Shaped:
        strategy, decoder = self.strategy, self._programs.decoder
        name = "enter", strategy, num_tokens
        function = partial(enter, decoder, strategy, self._axes, num_tokens)
        hidden_1D = jax.ShapeDtypeStruct((1, decoder.config.model_dim), decoder.backend.compute_dtype)
        draws = jax.ShapeDtypeStruct((), np.bool_)
        entry = self._entry_shapes, self._placed(hidden_1D), draws
        arguments = *self._shaped_rows(strategy), integers(), integers(1, columns), *entry
        return Shaped(name, function, (2, 3), arguments)

    def _shaped_start(self, num_tokens: int, columns: int) -> Shaped:
        name = "start drafting", self.strategy, num_tokens
        function = partial(start_drafting, self._programs.decoder, self.strategy, self._axes, num_tokens)
        return Shaped(name, function, (3,), (*self._shaped_rows(self.strategy), integers(), integers(1, columns)))

    def _shaped_window(self, strategy: Strategy, size: int, columns: int) -> Shaped:
        most_new = self._most_steps * (strategy.max_depth + 1)
        name = "window", strategy, most_new
        function = partial(run_window, self._programs.decoder, strategy, self._axes, most_new)
        arguments = *self._shaped_rows(strategy), *described_window(size, columns)
        return Shaped(name, function, (2, 3), arguments)

    def _shaped_rows(self, strategy: Strategy) -> tuple[Any, ...]:
        return self._params, strategy.parameters, *self._held_shapes

    def _placed(self, described: Any) -> Any:
        """Describe what programs return where it is on a mesh."""
        return self._partitioner.placed(described)

    def _window_shapes(self, num_rows: int, num_pages: int) -> list[tuple[int, int]]:
        return list(product(self._sizes(num_rows), self._columns_from(num_pages)))

    def _chunks(self, count: int) -> list[int]:
        """Return the sizes of chunks that hold so many tokens."""
        return powers_from(max(_LEAST_CHUNK, count), max(_LEAST_CHUNK, self._chunk))

    def _sizes(self, count: int) -> list[int]:
        """Return the numbers of rows that a window of so many may have."""
        return powers_from(count, self._num_rows)

    def _texts(self, count: int) -> list[int]:
        """Return the numbers of tokens that a text of so many may be padded to."""
        return levels_from(count, self._num_slots)

    def _texts_within(self, columns: int) -> list[int]:
        """Return those that a text on so many pages may be padded to."""
        return [tokens for tokens in self._texts(1) if tokens <= columns * self._page_size] or self._texts(1)[:1]

    def _columns_from(self, count: int) -> list[int]:
        """Return the widths of tables that hold so many pages."""
        levels = levels_from(count * self._page_size, self._columns * self._page_size)
        return [-(-level // self._page_size) for level in levels]

    def _padded(self, pages: Sequence[int], fill: int) -> np.ndarray:
        """Return page numbers, as many as a power of two."""
        size = 1 << (max(len(pages), 1) - 1).bit_length()
        return np.array([*pages, *[fill] * (size - len(pages))], np.int32)

    def _state_of(self, entry: Entry) -> DecodeState:
        config = self._programs.decoder.config
        arrays = sampling_arrays([entry.sampling], [entry.sample], self._eos_token_ids, config.num_tokens)
        rows = state_of(entry, widened(arrays, self._widths), self._num_slots, self.strategy.max_depth)
        numbers = {"prompt_lengths_B": entry.prompt_length, "context_lengths_B": entry.context_length}
        if isinstance(entry.sampling.grammar, TokenTable):
            numbers["grammar_states_B"] = entry.sampling.grammar.after(entry.tokens[entry.prompt_length :])
        return rows._replace(**{name: np.array([number], np.int32) for name, number in numbers.items()})

    def _described(self, batch: int) -> Rows:
        """Describe what the device holds of so many rows, by tracing how a drafter begins: it takes 0.3 s."""
        key = batch, self._widths
        if key not in self._descriptions:
            one, decoder = self._state_of(ANY_ENTRY), self._programs.decoder
            found = described_rows(decoder, self.strategy, self._params, one, batch, self._num_slots)
            self._descriptions[key] = found
        return self._descriptions[key]

    def _sampling_widths(self, sampling: Sequence[SamplingParams]) -> tuple[int, ...]:
        config = self._programs.decoder.config
        arrays = sampling_arrays(sampling, [0] * len(sampling), self._eos_token_ids, config.num_tokens)
        return _widths(arrays)

    def _make_room_for(self, sampling: SamplingParams) -> None:
        """Widen the rows' lists of biases and stop tokens, and their grammars, where a sequence needs more."""
        widths = tuple(map(max, self._widths, self._sampling_widths([sampling])))
        if widths != self._widths:
            self._widths = widths
            self._entry_shapes = described(self._state_of(ANY_ENTRY))
            state = self._rows.state
            self._rows = self._rows._replace(state=state._replace(sampling=widened(state.sampling, widths)))
            self._held_shapes = self._placed(described((self._pools, self._rows)))


def _widths(arrays: SamplingArrays) -> tuple[int, ...]:
    """Return the numbers of biases, stop tokens, a grammar's states and classes, and the tokens of its vocabulary."""
    lists = arrays.bias_ids_BX, arrays.stop_ids_BE
    return *(array.shape[1] for array in lists), *arrays.grammar_next_BNC.shape[1:], arrays.grammar_classes_BV.shape[1]


def widened(arrays: SamplingArrays, widths: tuple[int, ...]) -> SamplingArrays:
    """Pad lists of biases and stop tokens, and grammars."""
    biases, stops, num_states, num_classes, vocab_size = widths

    def padded(array: Any, *width_and_fill: int | float) -> Any:
        *width, fill = width_and_fill
        pads = [(0, 0), *((0, new - old) for new, old in zip(width, array.shape[1:], strict=True))]
        return (np if isinstance(array, np.ndarray) else jnp).pad(array, pads, constant_values=fill)

    if _widths(arrays) == widths:
        return arrays
    return arrays._replace(
        bias_ids_BX=padded(arrays.bias_ids_BX, biases, NO_TOKEN),
        bias_values_BX=padded(arrays.bias_values_BX, biases, 0.0),
        stop_ids_BE=padded(arrays.stop_ids_BE, stops, NO_TOKEN),
        grammar_next_BNC=padded(arrays.grammar_next_BNC, num_states, num_classes, -1),
        grammar_classes_BV=padded(arrays.grammar_classes_BV, vocab_size, 0),
        grammar_only_BN=padded(arrays.grammar_only_BN, num_states, NO_TOKEN),
    )
