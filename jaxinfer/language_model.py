"""A language model as people use it: text in, text out; `jaxinfer.model_loading` makes one from a checkpoint."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxinfer.cache.layouts import DENSE, CacheLayout, PagedLayout, parse_layout
from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.decoding.batch import pad_texts
from jaxinfer.decoding.cropping import check_strategy
from jaxinfer.decoding.kept_programs import KeptPrograms
from jaxinfer.decoding.programs import Programs
from jaxinfer.decoding.registry import parse_strategy
from jaxinfer.decoding.runner import start_batch
from jaxinfer.decoding.strategy import Strategy, Target
from jaxinfer.errors import InvalidOption, InvalidTokenizer, shown
from jaxinfer.grammar.tables import GrammarTables
from jaxinfer.kept.folder import KeptFolder
from jaxinfer.model_adapters import ModelAdapters
from jaxinfer.model_checks import check_max_len, check_mesh, check_texts, check_whole, read_tokenizer, says_alike
from jaxinfer.model_params import loaded_checkpoint, made_once, stored_fingerprint
from jaxinfer.model_sparsity import columns_beside
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.fingerprint import fingerprint
from jaxinfer.models.folded import Folded, joined
from jaxinfer.models.streaming import is_endless
from jaxinfer.notation import Array, Float, Params
from jaxinfer.ops.backend import Backend
from jaxinfer.parallel.mesh import MeshConfig
from jaxinfer.parallel.partitioner import Partitioner, partitioner_of
from jaxinfer.results import GenerationResult, StreamPiece
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.start_times import LoadTimes
from jaxinfer.text_generation import Run, TextRequest, count_rows, cut_batches, exhaust, run_requests, stream_pieces
from jaxinfer.text_requests import check_new_tokens, is_next_turn, listed, sampling_of_each, text_requests
from jaxinfer.text_values import Scorer, values_of_rows, with_value
from jaxinfer.tokenizers import Tokenizer, encode_chat

if TYPE_CHECKING:  # few use an engine
    from jaxinfer.engine.config import EngineConfig
    from jaxinfer.engine.engine import Engine
    from jaxinfer.engine.kept_pages import KeptPages
    from jaxinfer.engine.prefix import EnginePrefix

# Of compiled programs that are kept.
_MAX_PROGRAMS_BYTES = 256 << 20
# The longest text that positions of 32 bits can count.
_ENDLESS = 2**30

Prompt = str | Sequence[int]


class LanguageModel:
    """A decoder with its parameters and its tokenizer; `load` makes one from a checkpoint.

    On a mesh ``params`` are split over its devices, and filled up with zeros where they do not split evenly;
    ``is_rounded`` says that they have fewer bits than those of its checkpoint, ``source``, if it has one; ``folded``
    are the checkpoint's unless given.
    """

    def __init__(
        self,
        config: DecoderConfig,
        params: Params,
        backend: Backend,
        checkpoint: Checkpoint | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        max_len: int | None = None,
        cache: str | CacheLayout = "dense",
        mesh: MeshConfig | Mesh | str | None = None,
        kept: str | Path | None = None,
        load_times: LoadTimes | None = None,
        is_rounded: bool = False,
        folded: Folded | None = None,
    ) -> None:
        layout = parse_layout(cache)
        check_max_len(config, max_len, layout)
        partitioner = partitioner_of(mesh)
        check_mesh(layout, partitioner)
        partitioner.check(config)
        part = partitioner.partition(config, backend)
        self.config, self.backend = config, backend
        self.params = partitioner.place_params(config, backend, params)
        self.max_len = max_len or (_ENDLESS if is_endless(layout) else config.max_position)
        programs = None if kept is None else KeptPrograms(KeptFolder(Path(kept) / "programs", _MAX_PROGRAMS_BYTES))
        self.programs = Programs(Decoder(part.config, part.backend), layout, partitioner, programs)
        self.load_times = load_times or LoadTimes()
        self.source, self._is_rounded, self._kept, self._has_engine = checkpoint, is_rounded, kept, False
        self.folded = checkpoint.folded if folded is None and checkpoint is not None else folded
        self._resolved: dict[tuple[Strategy, Partitioner], Strategy] = {}
        self._beside_columns = columns_beside(config, self.params, backend, partitioner)
        self.loaded_adapters = ModelAdapters(config, backend, self.params, partitioner, checkpoint, self.folded)
        if tokenizer is not None:
            self.tokenizer = tokenizer

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer; where `load` could read none, text raises the reason and token ids still work."""
        if self.source is None:
            raise InvalidTokenizer("this model has no tokenizer: pass token ids, or make it with a tokenizer")
        return read_tokenizer(self.source, self.config)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text, by the configuration and, where there is one, the tokenizer."""
        tokenizer = self._tokenizer_or_none()
        return tuple(dict.fromkeys((*self.config.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ()))))

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 128,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        strategy: str | Strategy = "autoregressive",
        batch_size: int = 16,
        reuse: bool = False,
        adapter: str | Sequence[str | None] | None = None,
        value: Scorer | None = None,
    ) -> list[GenerationResult]:
        """Continue prompts, raw text or token ids; one result a prompt and sample, in the prompts' order.

        ``sampling`` is one for all or one a prompt; a prompt with ``n`` samples gives ``n`` results in a row. At most
        ``batch_size`` rows run at a time, of which a beam search takes its width. On a CPU a row that ends is given to
        the next prompt at once (continuous batching); elsewhere, and for ``mcts``, the next batch begins when all rows
        have ended. With ``reuse`` a CPU keeps what it has computed, and a later call with ``reuse`` and the same
        strategy computes only what is new in its prompts; that changes no bit. ``adapter`` names a loaded adapter for
        all prompts, or one for each; None is the model itself. ``value``, for ``mcts`` only, takes a list of
        `jaxinfer.Candidate` and returns a number for each, the more the better.
        """
        batches = self.generate_batches(
            prompts,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            strategy=strategy,
            batch_size=batch_size,
            reuse=reuse,
            adapter=adapter,
            value=value,
        )
        return [result for batch in batches for result in batch]

    def generate_batches(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 128,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        strategy: str | Strategy = "autoregressive",
        batch_size: int = 16,
        reuse: bool = False,
        adapter: str | Sequence[str | None] | None = None,
        value: Scorer | None = None,
    ) -> Iterator[list[GenerationResult]]:
        """Yield the results of `generate` in order, some at a time; all prompts are checked before the first one runs.

        As each batch ends; or, where rows are refilled, as soon as the next result is there.
        """
        prompts = listed(prompts)
        check_whole("batch_size", batch_size, least=1)
        resolved = self.resolve(with_value(strategy, value))
        requests, params = self._requests(prompts, max_new_tokens, sampling, resolved, adapter), self.adapted_params
        num_rows = count_rows(requests, resolved.rows_per_prompt)
        if self._keeps_pages(resolved, reuse or (resolved.adapts and num_rows <= batch_size)):
            yield self._kept_pages.results(params, resolved, requests, min(batch_size, num_rows))
            return
        if self.refills(num_rows, batch_size, resolved):
            from jaxinfer.engine.serve_all import serve_all

            yield from serve_all(
                self._paged_programs,
                params,
                resolved,
                requests,
                num_rows=batch_size,
                max_len=self.max_len,
                eos_token_ids=self.eos_token_ids,
                tokenizer=self._tokenizer_for(requests),
                kept_pace=self._kept_pages.kept_pace,
            )
            return
        for group, num_prompts in cut_batches(requests, resolved.rows_per_prompt, batch_size):
            yield exhaust(self._run(params, group, resolved, num_prompts, is_watched=False))

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        sampling: SamplingParams | None = None,
        strategy: str | Strategy = "autoregressive",
        reuse: bool = False,
        adapter: str | None = None,
        value: Scorer | None = None,
    ) -> Iterator[StreamPiece]:
        """Continue one prompt and yield its text as it comes; the last piece carries the result.

        ``reuse``, ``adapter`` and ``value`` are those of `generate`. The text of a beam search comes whole, at its end.
        """
        resolved = self.resolve(with_value(strategy, value))
        requests, params = self._requests([prompt], max_new_tokens, sampling, resolved, adapter), self.adapted_params
        if len(requests) != 1:
            raise InvalidOption(f"streaming returns one sample, but n is {len(requests)}: use generate")
        if self._keeps_pages(resolved, reuse or resolved.adapts):
            return self._kept_pages.stream(params, resolved, requests[0])
        return stream_pieces(self._run(params, requests, resolved, 1, is_watched=True))

    def engine(
        self, config: "EngineConfig | None" = None, *, strategy: str | Strategy = "autoregressive", **options: Any
    ) -> "Engine":
        """Return an engine that serves requests as they come; ``options`` are those of `EngineConfig`.

        A model has one engine at a time, and keeps its adapters while that runs.
        """
        from jaxinfer.engine.assembly import group_models
        from jaxinfer.engine.config import engine_config
        from jaxinfer.engine.engine import Engine

        if self.programs.layout != DENSE:
            raise InvalidOption("an engine has a paged cache of its own: load the model without another cache")
        config = engine_config(options, config)
        self._check_no_engine("engine")
        resolve = partial(self._resolve, strategy)
        groups = group_models(self.programs, self.params, self.adapted_params, resolve)
        resolved = groups[0].strategy

        def make_requests(
            prompts: list[Prompt], max_new_tokens: int, sampling: Any, adapter: str | None = None
        ) -> list[TextRequest]:
            requests = self._requests(prompts, max_new_tokens, sampling, resolved, adapter)
            self._tokenizer_for(requests)
            return requests

        def closed() -> None:
            self._has_engine = False

        self._has_engine = True
        try:
            return Engine(
                groups,
                config,
                max_len=self.max_len,
                eos_token_ids=self.eos_token_ids,
                tokenizer=self._tokenizer_or_none,
                make_requests=make_requests,
                on_close=closed,
            )
        except BaseException:
            self._has_engine = False
            raise

    def prefix(
        self, prompt: Prompt, *, strategy: str | Strategy = "autoregressive", adapter: str | None = None
    ) -> "EnginePrefix":
        """Compute the beginning of later prompts once, and keep it until it is released; use it as a context.

        Meanwhile `generate`, `stream` and `chat` with this strategy compute only what comes after it. On a CPU, where
        that changes no bit; elsewhere an engine has prefixes. It serves prompts with the same ``adapter``.
        """
        resolved = self.resolve(strategy)
        if not self._can_share_pages(resolved):
            raise InvalidOption("prefix: only a CPU with its own kernels, a dense cache and no mesh keeps pages here")
        request = self._requests([prompt], 1, None, resolved, adapter)[0].request
        return self._kept_pages.hold(self.adapted_params, request.prompt, resolved, request.adapter)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> GenerationResult:
        """Answer a conversation, messages of ``role`` and ``content``, as `generate` does; a turn reuses the last."""
        return self.generate([self.encode_chat(messages)], **{"reuse": is_next_turn(messages), **options})[0]

    def stream_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Iterator[StreamPiece]:
        """Answer a conversation and yield the answer as it comes; options as for `stream`, reuse as for `chat`."""
        return self.stream(self.encode_chat(messages), **{"reuse": is_next_turn(messages), **options})

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Return the ids of a conversation up to its answer; options as for `jaxinfer.tokenizers.encode_chat`."""
        return encode_chat(self.tokenizer, messages, **options)

    def logits(
        self, token_ids: Sequence[Sequence[int]], *, adapter: str | Sequence[str | None] | None = None
    ) -> Float[Array, "B T V"]:
        """Return the logits of every token of whole texts, in float32 (float64 for a float64 model).

        Texts of unequal length are padded on the right; what stands there means nothing. ``adapter`` as in `generate`.
        """
        rows = check_texts(token_ids, self.config)
        longest = max(map(len, rows))
        num_padding = self.programs.partitioner.num_rows(len(rows)) - len(rows)
        texts = pad_texts([*rows, *[[]] * num_padding], self.programs.decoder.backend)
        adapters_B = np.array(self.loaded_adapters.numbers(adapter, len(rows)) + [0] * num_padding, np.int32)
        logits_BTV = self.programs.logits(self.adapted_params, *texts, adapters_B)
        if not logits_BTV.is_fully_addressable:
            logits_BTV = self.programs.partitioner.fetch(logits_BTV)
        return logits_BTV[: len(rows), :longest]

    @property
    def adapters(self) -> Mapping[str, str]:
        """The adapters that are loaded: where each one came from, by its name."""
        return self.loaded_adapters.origins

    @property
    def adapted_params(self) -> Params:
        """The parameters with those of the loaded adapters, as programs take them beside the numbers of rows' own."""
        return self._beside_columns(self.loaded_adapters.beside(self.params))

    def load_adapter(
        self, name: str, path: str | Path, *, revision: str | None = None, token: str | None = None
    ) -> None:
        """Load a low-rank adapter (LoRA, rsLoRA, DoRA), under a name for `generate`. Any number may be loaded.

        ``path`` is a folder that PEFT saved, or on the hub ``owner/name`` or ``owner/name/folder``, at a ``revision``.
        Raises JaxinferError for what is neither or does not fit the model.
        """
        self._check_no_engine("load_adapter")
        self.loaded_adapters.load(name, path, revision=revision, token=token)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; texts that are being written with it go on."""
        self._check_no_engine("unload_adapter")
        if "_kept_pages" in self.__dict__ and self._kept_pages.holds_of(*self.loaded_adapters.numbers(name, 1)):
            raise InvalidOption(f"unload_adapter: a prefix of adapter {name!r} is held: release it first")
        self.loaded_adapters.unload(name)

    def merge_adapter(self, name: str) -> "LanguageModel":
        """Return a model with a loaded adapter added to its weights, rounded once; raises as `merged.merged` does."""
        return self.changed(*self.loaded_adapters.merged(name))

    def changed(
        self,
        params: Params,
        checkpoint: Checkpoint | None = None,
        *,
        backend: Backend | None = None,
        cache: str | CacheLayout | None = None,
        is_rounded: bool = False,
        folded: Folded | None = None,
    ) -> "LanguageModel":
        """Return a model that differs in its parameters, and in what else is given; it has no adapters."""
        return LanguageModel(
            self.config,
            params,
            backend or self.backend,
            checkpoint or self.source,
            tokenizer=self._tokenizer_or_none(),
            max_len=self.max_len,
            cache=self.programs.layout if cache is None else cache,
            mesh=self.programs.partitioner.mesh,
            is_rounded=is_rounded,
            folded=joined(self.folded, folded),
        )

    def _check_no_engine(self, what: str) -> None:
        if self._has_engine:
            raise InvalidOption(f"{what}: this model has an engine that runs: close it first")

    def save(
        self, folder: str | Path, *, overwrite: bool = False, progress: Callable[[int, int], None] | None = None
    ) -> Path:
        """Write the model to a new folder, which loads on any mesh as it is here; return the folder.

        ``overwrite`` replaces one that this method or `jaxinfer convert` wrote.
        """
        if not isinstance(folder, str | Path):
            raise InvalidOption(f"folder {shown(folder)} is no text and no path")
        if self.source is None:
            raise InvalidOption("this model was not loaded from a checkpoint, so its configuration cannot be saved")
        # Imported here: few save.
        from jaxinfer.checkpoint.convert import save

        partitioner = self.programs.partitioner
        padding = partitioner.padding_on_mesh(self.config, self.backend)
        found, names = (self.source, self.params, self.config, padding), lambda: self.base_fingerprint
        return save(loaded_checkpoint(*found, names, self.folded), folder, overwrite=overwrite, progress=progress)

    def speaks_like(self, checkpoint: Checkpoint) -> bool:
        """Tell whether a checkpoint's tokenizer gives this model's ids; without two tokenizers there is no telling."""
        return says_alike(self._tokenizer_or_none(), checkpoint)

    def refills(self, num_rows: int, batch_size: int, strategy: str | Strategy = "autoregressive") -> bool:
        """Tell whether `generate` gives rows that end to the next prompt, where all results need ``num_rows`` rows."""
        resolved = self.resolve(strategy)
        rows_each = resolved.rows_per_prompt or 1
        return num_rows // rows_each > batch_size // rows_each > 1 and self._can_share_pages(resolved)

    def _can_share_pages(self, strategy: Strategy) -> bool:
        """Whether texts may run on pages, in any company, without that changing a bit."""
        programs = self.programs
        is_plain = programs.layout == DENSE and programs.partitioner.mesh is None
        return is_plain and strategy.runs_in_engine and programs.decoder.backend.keeps_bits

    def _keeps_pages(self, strategy: Strategy, reuse: bool) -> bool:
        """Whether a call is to run on kept pages, and may."""
        is_wanted = reuse or ("_kept_pages" in self.__dict__ and self._kept_pages.holds)
        return is_wanted and self._can_share_pages(strategy)

    @cached_property
    def _kept_pages(self) -> "KeptPages":
        from jaxinfer.engine.kept_pages import KeptPages

        return KeptPages(
            self._paged_programs,
            max_len=self.max_len,
            eos_token_ids=lambda: self.eos_token_ids,
            tokenizer=self._tokenizer_or_none,
        )

    @cached_property
    def _grammars(self) -> GrammarTables:
        return GrammarTables(lambda: self.tokenizer, self.eos_token_ids, self.config.vocab_size)

    @cached_property
    def _paged_programs(self) -> Programs:
        """The programs of `generate` where rows are refilled."""
        return self.programs.beside(PagedLayout())

    def _requests(
        self,
        prompts: list[Prompt],
        max_new_tokens: int,
        sampling: object,
        strategy: Strategy,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[TextRequest]:
        sampling = [self._grammars.in_tokens(one) for one in sampling_of_each(sampling, len(prompts))]
        return text_requests(
            prompts,
            check_new_tokens(max_new_tokens),
            sampling,
            strategy,
            encode=lambda text: self.tokenizer.encode(text),
            vocab_size=self.config.vocab_size,
            max_len=self.max_len,
            can_grow=self.max_len != self.config.longest_text,
            adapters=self.loaded_adapters.numbers(adapter, len(prompts)),
        )

    def resolve(self, strategy: str | Strategy) -> Strategy:
        """Return a strategy with everything that its options name loaded, once for all calls that name it."""
        return self._resolve(strategy, self.programs.partitioner, self.params)

    def _resolve(self, strategy: str | Strategy, on: Partitioner, params: Params) -> Strategy:
        """Return a strategy resolved for these devices and the model's parameters on them."""
        parsed = parse_strategy(strategy)
        if parsed.needs_dense_cache and self.programs.layout != DENSE:
            raise InvalidOption(f"strategy {parsed.name} needs the dense cache: load the model without another")
        check_strategy(parsed, self.programs.layout)
        names, once = lambda: self.base_fingerprint, made_once(self._kept, self.load_times, params)
        target = Target(self.config, self.backend, params, self.speaks_like, on, names, self.source, once, self.folded)
        if jax.tree.leaves(parsed.parameters):  # arrays are not compared, so an equal strategy may hold others
            return parsed.resolve(target)
        if (parsed, on) not in self._resolved:
            self._resolved[parsed, on] = parsed.resolve(target)
        return self._resolved[parsed, on]

    @cached_property
    def fingerprint(self) -> str:
        """A few letters that stand for the weights: drafters that were trained for them name these."""
        partitioner = self.programs.partitioner
        return fingerprint(self.params, partitioner.padding_on_mesh(self.config, self.backend), partitioner.fetch)

    @cached_property
    def base_fingerprint(self) -> str:
        """The fingerprint of the weights before they were rounded: drafters for those fit these too."""
        stored = self.source
        if stored is None or not (stored.rounded_from or self._is_rounded):
            return self.fingerprint
        return stored.rounded_from or stored_fingerprint(stored, self.config, self.backend)

    def _run(
        self, params: Params, requests: list[TextRequest], strategy: Strategy, num_prompts: int, *, is_watched: bool
    ) -> Run:
        eos_token_ids, tokenizer = self.eos_token_ids, self._tokenizer_for(requests)
        batch = start_batch(
            self.programs,
            params,
            strategy,
            [request.request for request in requests],
            eos_token_ids,
            self.max_len,
            num_prompts,
            values_of_rows(strategy, requests, eos_token_ids, tokenizer),
        )
        return run_requests(requests, batch, eos_token_ids, tokenizer, strategy.learn, is_watched=is_watched)

    def _tokenizer_for(self, requests: list[TextRequest]) -> Tokenizer | None:
        """Return the tokenizer, None if there is none; raise the reason if a request cannot do without."""
        needs_text = any(request.text is not None or request.request.sampling.stop for request in requests)
        return self.tokenizer if needs_text else self._tokenizer_or_none()

    def _tokenizer_or_none(self) -> Tokenizer | None:
        try:
            return self.tokenizer
        except InvalidTokenizer:
            return None
