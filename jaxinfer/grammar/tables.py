"""A model's compiled grammars."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jaxinfer.grammar.automaton import automaton
from jaxinfer.grammar.grammar import Grammar
from jaxinfer.grammar.table import TokenTable, token_table
from jaxinfer.grammar.vocabulary import token_bytes
from jaxinfer.tokenizers.tokenizer import Tokenizer

_MOST_KEPT = 64


class GrammarTables:
    """Compiles grammars for a model's tokens, and keeps the last `_MOST_KEPT` tables. Any thread may ask."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], eos_token_ids: Sequence[int], vocab_size: int) -> None:
        self._tokenizer, self._ends, self._vocab_size = tokenizer, tuple(eos_token_ids), vocab_size
        self._spellings: list[bytes | None] | None = None
        self._kept: OrderedDict[Grammar, TokenTable] = OrderedDict()
        # Grammars that are there do not wait for one that is compiled.
        self._lock, self._compiling = threading.Lock(), threading.Lock()

    def in_tokens(self, sampling: Any) -> Any:
        """Return sampling parameters whose grammar, if they have one, is compiled."""
        if not isinstance(sampling.grammar, Grammar):
            return sampling
        return replace(sampling, grammar=self.table(sampling.grammar))

    def table(self, grammar: Grammar) -> TokenTable:
        """Return a grammar's table; raise InvalidOption for one that cannot be compiled."""
        found = self._find(grammar)
        if found is not None:
            return found
        with self._compiling:
            found = self._find(grammar)
            if found is None:
                if self._spellings is None:
                    self._spellings = token_bytes(self._tokenizer())
                found = token_table(automaton(grammar), self._spellings, self._ends, self._vocab_size)
                with self._lock:
                    self._kept[grammar] = found
                    while len(self._kept) > _MOST_KEPT:
                        self._kept.popitem(last=False)
            return found

    def _find(self, grammar: Grammar) -> TokenTable | None:
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
            return self._kept.get(grammar)
