"""Monte-Carlo tree search: decide each token by what continuations through it are worth, in trees that mctx grows."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

from jaxinfer.checkpoint.value_head import read_value_head
from jaxinfer.decoding.options import check_choice, check_range
from jaxinfer.decoding.strategies.autoregressive import Autoregressive
from jaxinfer.decoding.strategy import Target
from jaxinfer.errors import InvalidOption, shown

_MOST_SIMULATIONS, _MOST_ACTIONS, _MOST_TOKENS = 4096, 1024, 1024


@dataclass(frozen=True)
class TreeSearch(Autoregressive):
    """Grow a tree of ``simulations`` nodes below the text, and go where it is worth most.

    A simulation goes down the tree to a token that has not been tried, one of the ``actions`` most probable ones, and
    continues the text behind it as plain decoding would, up to ``depth`` tokens. What that text is worth says
    ``scorer``, or the value head in the folder ``value`` (`jaxinfer.checkpoint.value_head`), or else its mean
    log-probability. ``policy`` is how it goes down and chooses: Gumbel MuZero (Danihelka
    et al., "Policy improvement by planning with Gumbel", 2022) or PUCT as in MuZero (1911.08265). A search decides
    ``tokens`` tokens: one by the policy, more along the best text that it has seen.

    ``scorer`` is a function of candidates (`jaxinfer.Candidate`), which `LanguageModel.generate` takes as ``value``.
    ``params`` are those of the value head, once it is resolved. The search has a loop of its own
    (`jaxinfer.decoding.search`).
    """

    name: ClassVar[str] = "mcts"
    description: ClassVar[str] = "search for the continuation that a function, or the model, holds for the best (MCTS)"
    needs_dense_cache: ClassVar[bool] = True

    simulations: int = 32
    actions: int = 8
    depth: int = 8
    tokens: int = 1
    policy: Literal["gumbel", "puct"] = "gumbel"
    value: str = ""
    scorer: Callable[..., Any] | None = field(default=None, repr=False)
    params: Any = field(default=None, compare=False, repr=False)

    @property
    def runs_in_engine(self) -> bool:
        return False

    def __post_init__(self) -> None:
        check_range(self, "simulations", 1, _MOST_SIMULATIONS)
        check_range(self, "actions", 1, _MOST_ACTIONS)
        check_range(self, "depth", 0, _MOST_TOKENS)
        check_range(self, "tokens", 1, _MOST_TOKENS)
        check_choice(self, "policy", ("gumbel", "puct"))
        if self.tokens > max(self.depth, 1):
            raise InvalidOption(f"mcts: tokens={self.tokens} is more than the depth={self.depth} that a search looks")
        if self.scorer is not None and not (callable(self.scorer) and isinstance(self.scorer, Hashable)):
            raise InvalidOption(
                f"mcts: value {shown(self.scorer)} is no function, or none that can be told from others"
            )
        if self.scorer is not None and self.value:
            raise InvalidOption(f"mcts: value={self.value} and a function both say what texts are worth: give one")

    @property
    def exactness(self) -> str:
        return "search"

    @property
    def parameters(self) -> Any:
        return () if self.params is None else self.params

    @property
    def headroom(self) -> int:
        # The current token, a slot for each node below it, and those for what continues a node.
        return 1 + self.simulations + self.depth

    def resolve(self, target: Target) -> "TreeSearch":
        if find_spec("mctx") is None:
            raise InvalidOption("mcts: tree search needs mctx; install it with: pip install 'jaxinfer[search]'")
        num_tokens = target.config.num_tokens
        if self.actions > num_tokens:
            raise InvalidOption(f"mcts: actions={self.actions} is more than the {num_tokens} tokens of the vocabulary")
        if self.scorer is not None and target.partitioner.mesh is not None:
            raise InvalidOption("mcts: a function as value runs on one device: load the model without a mesh")
        if not (self.depth or self.value or self.scorer):
            raise InvalidOption("mcts: depth=0 leaves a text as it is, which only value=FOLDER or a function can value")
        if not self.value or self.params is not None:
            return self
        head = read_value_head(Path(self.value).expanduser(), target.config, target.fingerprint)
        return replace(self, params=target.partitioner.place(head))
