"""The compiled programs of generation: prefill, and a decode loop that stays on the device."""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.interface import LayeredCache
from jaxinfer.cache.layouts import DENSE, CacheLayout
from jaxinfer.decoding.host_calls import HostCalls
from jaxinfer.decoding.kept_programs import KeptPrograms
from jaxinfer.decoding.live_programs import LIVE, LivePrograms
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.step import decode_step, forward_prompt, prefill_step
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.jax_setup import without_persistent_cache
from jaxinfer.models.adapters import LOADED
from jaxinfer.models.decoder import Decoder, create_cache
from jaxinfer.models.model import Model
from jaxinfer.models.pipeline import pass_schedule
from jaxinfer.notation import Array, Int, Params
from jaxinfer.ops.backend import Backend
from jaxinfer.parallel.partitioner import ONE_DEVICE, Partitioner

# Longest piece of a prompt that one pass of prefill attends from.
PREFILL_CHUNK = 512
# Every piece where steps have a fixed number of nodes. A v5e takes about as long to multiply so many rows of one prompt
# as to read the weights, so a short prompt costs no more, and a long one is bound by the same products.
FIXED_CHUNK = 256
# Every piece of prompts longer than that by the CPU kernels, whose bits do not depend on it: a token takes 6% longer
# than in pieces of 512, and far fewer places behind a prompt's last token are computed.
_CPU_CHUNK = 128


def prefill_chunk(backend: Backend, num_tokens: int) -> int:
    """Return how many tokens of prompts that are padded to ``num_tokens`` a pass of prefill has at most.

    Where rows are fixed, it has exactly so many.
    """
    if backend.fixed_rows > 1:
        return FIXED_CHUNK
    return min(PREFILL_CHUNK, _CPU_CHUNK) if backend.cpu_kernels and num_tokens > PREFILL_CHUNK else PREFILL_CHUNK


def prefill(
    decoder: Decoder, strategy: Strategy, num_tokens: int, params: Params, drafter_params: Any, state: DecodeState
) -> tuple[DecodeState, Any]:
    """Prefill the prompts of a fresh state; ``num_tokens`` is a power of two or at most `prefill_chunk`.

    ``drafter_params`` are the strategy's parameters.
    """
    model = Model.adapted(decoder, params, state.adapters_B)
    state, prefilled = prefill_step(model, state, num_tokens, prefill_chunk(decoder.backend, num_tokens))
    return state, strategy.start(model, drafter_params, state, prefilled)


def decode(
    decoder: Decoder,
    strategy: Strategy,
    params: Params,
    drafter_params: Any,
    state: DecodeState,
    memory: Any,
    max_steps: Int[Array, ""],
) -> tuple[DecodeState, Any]:
    """Run steps until every row has finished, at most ``max_steps`` of them."""
    model = Model.adapted(decoder, params, state.adapters_B)

    def goes_on(carry: tuple[Any, DecodeState, Any]) -> Any:
        step, state, _ = carry
        return (step < max_steps) & ~jnp.all(state.finished_B)

    def advance(carry: tuple[Any, DecodeState, Any]) -> tuple[Any, DecodeState, Any]:
        step, state, memory = carry
        return step + 1, *decode_step(model, strategy, drafter_params, state, memory)

    _, state, memory = jax.lax.while_loop(goes_on, advance, (jnp.int32(0), state, memory))
    return state, memory


def full_logits(
    decoder: Decoder,
    params: Params,
    tokens_BT: Int[Array, "B T"],
    lengths_B: Int[Array, " B"],
    adapters_B: Int[Array, " B"] | None = None,
) -> Any:
    """Return the logits of every token of whole texts, as prefill computes them."""
    cache = create_cache(decoder.config, tokens_BT.shape[0], tokens_BT.shape[1], decoder.backend)
    model = Model.adapted(decoder, params, adapters_B)
    chunk = prefill_chunk(decoder.backend, tokens_BT.shape[1])
    hidden_BTD, _ = forward_prompt(model, tokens_BT, lengths_B, cache, chunk)
    return model.logits(hidden_BTD)[..., : decoder.config.num_tokens]


@dataclass
class ProgramTimes:
    """Where the time before programs ran went, in seconds, and how many were compiled and how many read."""

    trace_seconds: float = 0.0
    compile_seconds: float = 0.0
    read_seconds: float = 0.0
    compilations: int = 0
    reads: int = 0


class Programs:
    """Compiles each program for its strategy and shapes and keeps it; states and memories are donated.

    ``layout`` is how the caches of their states are laid out, ``partitioner`` how these and the parameters are split.
    Programs that are ``kept`` are read instead, and those that are not are kept. ``live`` bounds how many programs this
    process has: one that it dropped is read or compiled again. ``compile_seconds`` adds up the time spent tracing,
    compiling and reading, ``compilations`` how many programs were compiled; ``times`` has all of it.
    """

    def __init__(
        self,
        decoder: Decoder,
        layout: CacheLayout = DENSE,
        partitioner: Partitioner = ONE_DEVICE,
        kept: KeptPrograms | None = None,
        live: LivePrograms = LIVE,
    ) -> None:
        self.decoder = decoder
        self.layout = layout
        self.partitioner = partitioner
        self.kept = kept
        self.host_calls = HostCalls()
        self.compile_seconds = 0.0
        self._waits = threading.local()
        self.times = ProgramTimes()
        self._beside: list[Programs] = []
        self._live = live
        self._owner = live.enter(self)
        self._lock = threading.Lock()
        self._making: dict[Any, Future[Callable[..., Any]]] = {}
        self._preparing: Future[None] | None = None
        self._failed: set[Any] = set()

    def beside(self, layout: CacheLayout) -> "Programs":
        """Return programs of the same decoder for caches of another layout; they are `all_sets` together."""
        other = Programs(self.decoder, layout, self.partitioner, self.kept)
        self._beside.append(other)
        return other

    def drafting(self, decoder: Decoder, partitioner: Partitioner) -> "Programs":
        """Return the programs of a draft model on devices of its own, made once; they are of `all_sets` too."""
        with self._lock:
            for other in self._beside:
                if (other.decoder, other.partitioner) == (decoder, partitioner):
                    return other
            # What is kept is for this model's devices.
            self._beside.append(Programs(decoder, DENSE, partitioner))
            return self._beside[-1]

    @property
    def all_sets(self) -> tuple["Programs", ...]:
        """These programs, and those beside them."""
        return self, *self._beside

    @property
    def live(self) -> dict[Any, Callable[..., Any]]:
        """The programs that are ready to run, by name, structure and shapes."""
        return self._live.of(self._owner)

    @property
    def compilations(self) -> int:
        """How many programs were compiled."""
        return self.times.compilations

    def prefill(
        self, strategy: Strategy, num_tokens: int, params: Params, state: DecodeState
    ) -> tuple[DecodeState, Any]:
        """Run `prefill`; ``state`` is consumed."""
        function = partial(prefill, self.decoder, strategy, num_tokens)
        return self.run(("prefill", strategy, num_tokens), function, (2,), params, strategy.parameters, state)

    def decode(
        self, strategy: Strategy, params: Params, state: DecodeState, memory: Any, max_steps: int
    ) -> tuple[DecodeState, Any]:
        """Run `decode`; ``state`` and ``memory`` are consumed."""
        function = partial(decode, self.decoder, strategy)
        arguments = (params, strategy.parameters, state, memory, np.int32(max_steps))
        return self.run(("decode", strategy), function, (2, 3), *arguments)

    def logits(self, params: Params, tokens_BT: Any, lengths_B: Any, adapters_B: Any) -> Any:
        """Run `full_logits`."""
        texts = self.partitioner.place_batch((tokens_BT, lengths_B, adapters_B))
        return self.run("logits", partial(full_logits, self.decoder), (), params, *texts)

    def create_cache(self, batch: int, num_slots: int, headroom: int, features: tuple[int, ...] = ()) -> LayeredCache:
        """Return an empty cache for a state, with the ``features`` that its strategy reads."""
        config, backend, layout = self.decoder.config, self.decoder.backend, self.layout
        return self.partitioner.create(
            lambda: create_cache(config, batch, num_slots, backend, headroom, layout, features)
        )

    def bubble(self, params: Params, cache: LayeredCache, rows: int, tokens: int) -> float:
        """Return for what part of a pass of so many new tokens a row a stage of a pipeline has nothing to do."""
        backend = self.decoder.backend
        tokens = min(tokens, prefill_chunk(backend, tokens))
        return pass_schedule(backend, params["blocks"], cache, rows, tokens).bubble

    def run(self, name: Any, function: Callable[..., Any], donated: tuple[int, ...], *arguments: Any) -> Any:
        """Run a function compiled for its name and the arguments' shapes.

        If the first are parameters, theirs are fixed, but for those of loaded adapters (`jaxinfer.models.adapters`).

        ``name`` tells apart all that ``function`` closes over; ``donated`` numbers the arguments that it consumes.
        """
        key = _key(name, arguments)
        program = self._live.use(self._owner, key)
        if program is None:
            began = time.perf_counter()
            program = self._make(key, function, donated, arguments)
            waited = time.perf_counter() - began
            self.compile_seconds += waited
            self._waits.seconds = self.waited_seconds + waited
        return program(*arguments)

    @property
    def waited_seconds(self) -> float:
        """What of `compile_seconds` this thread has waited for; two threads may wait for one program."""
        return getattr(self._waits, "seconds", 0.0)

    def is_ready(self, name: Any, *arguments: Any) -> bool:
        """Tell whether `run` would run at once; arrays may be described by ``jax.ShapeDtypeStruct``, here and below."""
        return self._live.use(self._owner, _key(name, arguments)) is not None

    def prepare(self, name: Any, function: Callable[..., Any], donated: tuple[int, ...], *arguments: Any) -> None:
        """Read or compile what `run` would run; any thread may call it."""
        key = _key(name, arguments)
        if self._live.use(self._owner, key) is None:
            self._make(key, function, donated, arguments)

    def prepare_soon(self, name: Any, function: Callable[..., Any], donated: tuple[int, ...], *arguments: Any) -> None:
        """Do as `prepare` does in another thread; nothing while that thread is at work, so ask again when needed."""
        if not self.is_preparing and _key(name, arguments) not in self._failed:
            with suppress(RuntimeError):  # the interpreter is about to exit
                self._preparing = _background().submit(self._try_to_prepare, name, function, donated, *arguments)

    @property
    def is_preparing(self) -> bool:
        """Whether the thread of `prepare_soon` is at work."""
        return self._preparing is not None and not self._preparing.done()

    def settle(self) -> int:
        """Wait for what `prepare_soon` has begun, in `all_sets`; return how many programs these have made so far."""
        for each in self.all_sets:
            if each._preparing is not None:
                each._preparing.result()
        return sum(each.times.compilations + each.times.reads for each in self.all_sets)

    def _try_to_prepare(self, name: Any, *rest: Any) -> None:
        try:
            self.prepare(name, *rest)
        except Exception:
            # Whoever cannot do without the program meets the error again in `run`.
            self._failed.add(_key(name, rest[2:]))

    def _make(
        self, key: Any, function: Callable[..., Any], donated: tuple[int, ...], arguments: tuple[Any, ...]
    ) -> Callable[..., Any]:
        """Return a program that is not there yet; of several threads that ask for it, one makes it."""
        with self._lock:
            program = self._live.use(self._owner, key)
            if program is not None:
                return program
            future = self._making.get(key)
            is_first = future is None
            if future is None:
                future = self._making[key] = Future()
        if not is_first:
            return future.result()
        try:
            program = self._get(function, donated, arguments)
            self._live.add(self._owner, key, program)
            future.set_result(program)
            return program
        except BaseException as error:
            future.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._making[key]

    def _get(
        self, function: Callable[..., Any], donated: tuple[int, ...], arguments: tuple[Any, ...]
    ) -> Callable[..., Any]:
        """Read a program, or compile it and keep it."""
        began, times, kept = time.perf_counter(), self.times, self.kept
        name = None if kept is None else kept.name(function, donated, arguments)
        if kept is not None and name is not None:
            found = kept.read(name, arguments)
            times.read_seconds += time.perf_counter() - began
            if found is not None:
                times.reads += 1
                return found
        began = time.perf_counter()
        lowered = jax.jit(self.partitioner.kept_in_place(function), donate_argnums=donated).lower(*arguments)
        traced = time.perf_counter()
        if kept is not None and name is not None:
            found = kept.read_lowered(name, lowered, arguments)
            if found is not None:
                times.trace_seconds += time.perf_counter() - began
                times.reads += 1
                return found
        # JAX compiles in a thread of its own and crashes if an interrupt frees what that thread works on. Waiting
        # through a worker lets the compilation end first.
        with ThreadPoolExecutor(1) as worker:
            if kept is None or name is None:
                compiled = worker.submit(lowered.compile).result()
            else:
                # What comes out of JAX's own cache cannot be written down again: parts of it are missing then.
                with without_persistent_cache():
                    compiled = worker.submit(lowered.compile).result()
                kept.write(name, lowered, compiled)
        times.trace_seconds += traced - began
        times.compile_seconds += time.perf_counter() - traced
        times.compilations += 1
        return compiled


def _key(name: Any, arguments: tuple[Any, ...]) -> Any:
    first, *others = arguments
    # Of parameters, only loaded adapters' shapes change.
    counted = first.get(LOADED) if isinstance(first, Mapping) else first
    leaves, structure = jax.tree.flatten((counted, others))
    return (name, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))


@cache
def _background() -> ThreadPoolExecutor:
    """Return the thread that compiles while others run; the interpreter waits for it before it exits."""
    return ThreadPoolExecutor(1, thread_name_prefix="jaxinfer-compile")
