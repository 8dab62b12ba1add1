"""The interface of every way to decode: propose a tree, let the target verify it, learn from what it drew."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp

from jaxinfer.cache.interface import LayeredCache
from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.decoding.acceptance.walk import Walk
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.trees.tree import DraftTree
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.folded import Folded
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Bool, Float, Int, Params
from jaxinfer.ops.backend import Backend
from jaxinfer.parallel.partitioner import ONE_DEVICE, Partitioner
from jaxinfer.sampling.params import SamplingParams

# Where rows cost time. On two CPU cores a step of 8 nodes takes 1.1 to 1.4 times one of a single node, of 16 1.6 to
# 1.9; the default model's heads, alone and summed with prompt lookup, gained less with 6, 10, 12 and 16.
_FEW_NODES = 8


class Proposal(NamedTuple):
    """A tree whose node 0 is each row's current token, and what drafting it has changed.

    ``cache`` is the target's where drafting wrote to it, else None. ``log_q_BMV`` are the log-probabilities that the
    children of each node were drawn from, for ``verify="rejection"``. ``passes`` is how much of the target's blocks
    drafting has read, as layers read / layers, ``steps_ahead`` how many steps a model took that decoded ahead.
    ``chances_BM`` is how likely the drafter holds each node to be taken, where it can tell: for good, or, with
    ``kinds_B``, until drafts of the same kind (`Strategy.num_kinds`) have been seen to be taken more or less often.
    """

    tree: DraftTree
    memory: Any
    cache: LayeredCache | None = None
    log_q_BMV: Any = None
    passes: Any = 0.0
    chances_BM: Any = None
    kinds_B: Any = None
    steps_ahead: Any = 0


class Prefilled(NamedTuple):
    """What prefill leaves: the final hidden states of the prompts' last tokens, and a length that spans all prompts."""

    hidden_BD: Float[Array, "B D"]
    num_tokens: int


MadeOnce = Callable[[Callable[[], Any], Callable[[], Params]], Params]


def made_anew(layout: Callable[[], Any], make: Callable[[], Params]) -> Params:
    """Return what ``make`` does, as `Target.made_once` where nothing is kept."""
    return make()


class Target(NamedTuple):
    """The model that a strategy is to serve, as far as loading what belongs to the strategy needs to know it.

    ``speaks_like`` tells whether a checkpoint's token ids mean the same text as the model's own; ``partitioner`` places
    what is loaded beside the model; ``fingerprint`` gives the model's (`jaxinfer.models.fingerprint`);
    ``checkpoint`` is the model's, where it came of one. ``made_once(layout, make)`` returns what ``make`` makes of the
    model's parameters to draft with, out of a file if an earlier process kept it; ``layout`` gives all else that
    decides the result. It is for drafts that are accepted by match alone, on which no token depends. ``folded`` are the
    factors that were folded into the model.
    """

    config: DecoderConfig
    backend: Backend
    params: Params
    speaks_like: Callable[[Checkpoint], bool] = lambda checkpoint: True
    partitioner: Partitioner = ONE_DEVICE
    fingerprint: Callable[[], str | None] = lambda: None
    checkpoint: Checkpoint | None = None
    made_once: MadeOnce = made_anew
    folded: Folded | None = None


def few_nodes(target: Target) -> int | None:
    """Return how many nodes a step of the target should have unless its user says so; None for any number."""
    return None if target.backend.has_free_rows else _FEW_NODES


class Nodes(NamedTuple):
    """Where a tree stands in the text: the cache position of its root, its relation and its nodes' positions."""

    start_B: Int[Array, " B"]
    ancestors_BMM: Bool[Array, "B M M"]
    positions_BM: Int[Array, "B M"]


class LastNode(NamedTuple):
    """The deepest node that a step took, whoever drafted it: its depth, and the target's answer there.

    The text has grown by ``depth_B`` + 1 tokens, unless that ended it.
    """

    depth_B: Int[Array, " B"]
    logits_BV: Float[Array, "B V"]
    hidden_BD: Float[Array, "B D"]
    aux: Any


class Verified(NamedTuple):
    """The target's answer at every node.

    ``passes`` is how much of the target's blocks was read, as layers read / layers. ``aux`` is what the strategy's own
    `forward` hands to its `observe`: arrays whose first two axes are rows and nodes. `forward` returns ``cache``
    written but not committed, and no ``last``; `observe` gets the committed one, and the last node that was taken.
    """

    logits_BMV: Any
    hidden_BMD: Any
    cache: LayeredCache
    passes: Any = 1.0
    aux: Any = None
    last: Any = None


@dataclass(frozen=True)
class Strategy(ABC):
    """Static and hashable: its fields are its options, and a program is compiled for each value of them.

    ``name`` is what the command line calls it. ``exactness`` is what it promises: ``"identical"`` (the tokens of plain
    decoding with the same seed), ``"distribution"`` (its distribution), ``"beam"`` (the texts of a beam search),
    ``"search"`` (those that a tree search holds for the best) or ``"lossy"``. `headroom` is how many cache slots past a
    text's end its trees may write, `max_depth` how many drafted tokens one step can accept, `verify` how drafts are
    accepted (``match``, ``rejection`` or ``typical``; see `jaxinfer.decoding.acceptance.walk`). One that
    `needs_dense_cache` runs on no cache that forgets tokens, one that does not say `runs_in_engine` in batches of its
    own only.

    Its methods from `start` on are traced. Each receives the target and the strategy's own `parameters`, which are
    arrays and therefore never part of what a program is compiled for: their field has ``compare=False`` and
    ``repr=False``. Fields without a ``repr`` are no options of the command line. How to write a strategy is told in
    ``jaxinfer/decoding/README.md``.
    """

    name: ClassVar[str] = ""
    description: ClassVar[str] = ""
    needs_dense_cache: ClassVar[bool] = False

    @property
    def is_search(self) -> bool:
        """Whether it looks for other texts than plain decoding's, and is no way to decode faster."""
        return self.exactness in ("beam", "search")

    @property
    def exactness(self) -> str:
        """What the strategy promises about its tokens."""
        return {"match": "identical", "rejection": "distribution", "typical": "lossy"}[self.acceptance]

    @property
    def acceptance(self) -> str:
        """How drafts are accepted: ``match``, ``rejection`` or ``typical``."""
        return "match"

    @property
    def branches(self) -> bool:
        """Whether its trees may have branches; False spares moving accepted nodes in the cache."""
        return True

    @property
    def needs_every_node(self) -> bool:
        """Whether it learns from the target's answer at every node, so that no node may be left out of a sum."""
        return False

    @property
    def may_draft_nothing(self) -> bool:
        """Whether steps without any draft are frequent enough to be worth a program of their own on a CPU."""
        return False

    @property
    def runs_in_engine(self) -> bool:
        """Whether an engine can run it, whose rows come and go."""
        return not self.drafts_elsewhere

    @property
    def drafts_elsewhere(self) -> bool:
        """Whether it drafts on devices of its own while the target verifies (`jaxinfer.decoding.ahead`)."""
        return False

    @property
    def num_kinds(self) -> int:
        """How many kinds of drafts it makes whose chances are not alike (`Proposal.kinds_B`)."""
        return 1

    @property
    def has_distinct_siblings(self) -> bool:
        """Whether, under rejection, a node's children are drawn one after the other without the tokens before."""
        return False

    @property
    def verifies_any_tree(self) -> bool:
        """Whether its `forward` serves trees of other drafters, so that it can be part of a sum."""
        return type(self).forward is Strategy.forward

    @property
    def fills_steps(self) -> bool:
        """Whether its steps are filled up to the backend's `fixed_rows`, to have the bits of plain decoding.

        Its `forward` then gets a larger tree than it proposed, and must run the target's layers on nothing but nodes.
        """
        return self.acceptance == "match"

    @property
    def slots_per_node(self) -> int:
        """How many cache slots its `forward` writes for each node."""
        return 1

    @property
    def features(self) -> tuple[int, ...]:
        """The layers, ascending, whose inputs it reads in ``state.cache.features``; once it is resolved."""
        return ()

    @property
    def typical_thresholds(self) -> tuple[float, float]:
        """Epsilon and delta of typical acceptance."""
        return 0.09, 0.3

    @property
    def parameters(self) -> Any:
        """Arrays of the strategy's own: a draft model's weights, heads."""
        return ()

    @property
    @abstractmethod
    def headroom(self) -> int:
        """Cache slots that a step writes past a row's last committed token."""

    @property
    @abstractmethod
    def max_depth(self) -> int:
        """The deepest node that a tree of this strategy can have."""

    @property
    def num_nodes(self) -> int:
        """How many nodes its trees have at most, the root included."""
        return -(-self.headroom // self.slots_per_node)

    @property
    def adapts(self) -> bool:
        """Whether it may rest, or take turns with what is `narrower`, wherever that is faster."""
        return False

    @property
    def narrower(self) -> tuple["Strategy", ...]:
        """The same strategy, resolved as it is, with fewer nodes a step; they may take turns from step to step."""
        return ()

    @property
    def ahead(self) -> "DecodesAhead | None":
        """A model that decodes ahead, which may take turns with it too; it verifies more nodes."""
        return None

    @property
    def rows_per_prompt(self) -> int | None:
        """How many rows of a batch all results of a prompt come from; None where each result is a row of its own."""
        return None

    def num_results(self, sampling: SamplingParams) -> int:
        """Return how many results a prompt gives; raise InvalidOption for sampling that the strategy cannot serve."""
        return sampling.n

    def bounded(self, nodes: int) -> "Strategy":
        """Return the strategy for a sum that verifies at most so many nodes, before it is resolved.

        It need not draft what would hardly ever be among them, and may draft what would not be worth nodes of its own.
        A strategy that has been resolved cannot be bounded anew.
        """
        return self

    def in_sum(self, max_depth: int) -> "Strategy":
        """Return the resolved strategy for a sum whose steps accept up to so many drafted tokens, whoever drafts them.

        One with a cache of its own has to catch up with as many that it has not seen.
        """
        return self

    def resolve(self, target: Target) -> "Strategy":
        """Return the strategy with what its options name loaded for this target; itself where nothing is missing.

        Called on the host before a program is compiled. Raises errors of `jaxinfer.errors` for what does not fit.
        """
        return self

    def check_slots(self, num_slots: int) -> None:
        """Raise InvalidOption where an option does not fit a cache of so many slots."""
        return None

    @property
    def keeps_file(self) -> bool:
        """Whether what it learns is kept in a file, which no other process has."""
        return False

    def learn(self, answer: Sequence[int]) -> None:
        """Note the tokens of an answer that is whole, for requests to come; called on the host, by any thread."""
        return None

    def start(self, model: Model, params: Any, state: DecodeState, prefilled: Prefilled) -> Any:
        """Return what the strategy remembers between steps, as a pytree, from the state after prefill."""
        return ()

    @abstractmethod
    def propose(self, model: Model, params: Any, state: DecodeState, memory: Any) -> Proposal:
        """Draft a tree."""

    def forward(self, model: Model, params: Any, state: DecodeState, proposal: Proposal, nodes: Nodes) -> Verified:
        """Run the target over the tree; ``state.cache`` is the one that drafting left."""
        tokens_BM, placements = proposal.tree.tokens_BM, state.cache.place(nodes.start_B, nodes.ancestors_BMM)
        hidden_BMD, cache = model.forward(
            tokens_BM, nodes.positions_BM, state.cache, placements, state.context_lengths_B
        )
        return Verified(model.logits(hidden_BMD), hidden_BMD, cache)

    def observe(
        self,
        model: Model,
        params: Any,
        state: DecodeState,
        proposal: Proposal,
        verified: Verified,
        draws_BM: Any,
        walk: Walk,
    ) -> Any:
        """Return the memory after a step, whose tokens ``state`` holds already.

        Nodes are numbered as this strategy proposed them, in a sum too: ``proposal.tree``, the arrays of ``verified``,
        ``draws_BM``, which is the target's token at every node, taken or not, and ``walk``, which is the path as far as
        it leads along this strategy's nodes. What is true of the step as a whole is in ``verified.last``.

        Only nodes that ``proposal.tree.valid_BM`` marks have an answer. A sum of bounded size may leave others out:
        those are no longer valid, and token, draw, logits and hidden state there are the root's once more.
        """
        return proposal.memory

    def resumed(self, memory: Any, last: LastNode) -> Any:
        """Return the memory for a text that others have carried on; ``last`` is what the target answered at its end.

        Right as it is for what remembers nothing of the text's end, which is read from the state.
        """
        return memory


class DecodesAhead(Strategy):
    """One whose drafts are what another model decodes, by a strategy of its own: the ``drafter``."""

    drafter: Strategy


def current_tokens(state: DecodeState) -> Int[Array, " B"]:
    """Return each row's current token: known, not yet in the cache."""
    return jnp.take_along_axis(state.tokens_BS, state.lengths_B[:, None] - 1, axis=1)[:, 0]
