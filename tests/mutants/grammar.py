"""Faults of grammars: their automata, tables, states along trees, and what may come."""

from tests.mutants.fault import Fault

_TABLE, _DECODING = "tests/grammar/test_table.py", "tests/grammar/test_decoding.py"
_ON_DEVICE = "jaxinfer/sampling/grammar.py"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a text may end where a longer one may",
        "jaxinfer/grammar/compiling.py",
        'f"(?:{pattern}){_END}"',
        'f"(?:{pattern}){_END}?"',
        f"{_TABLE}::test_what_matches_passes_in_any_tokens_and_nothing_else",
    ),
    Fault(
        "states from which no text ends stay",
        "jaxinfer/grammar/table.py",
        "found = smallest(trimmed(Automaton(next_NC, given.ends_N)))",
        "found = smallest(Automaton(next_NC, given.ends_N))",
        f"{_TABLE}::test_ways_that_the_tokens_cannot_end_are_closed",
    ),
    Fault(
        "tokens without text may come",
        "jaxinfer/grammar/table.py",
        "        reached_XS[0] = DEAD",
        "        reached_XS[0] = states_S",
        f"{_TABLE}::test_from_every_state_a_text_can_end",
    ),
    Fault(
        "a group may be closed that is not open",
        "jaxinfer/grammar/compiling.py",
        "            if depth < 0:",
        "            if depth < -9:",
        f"{_TABLE}::test_what_says_nothing_is_refused_in_one_line",
    ),
    Fault(
        "all nodes of a tree have the root's state",
        _ON_DEVICE,
        "    return jax.lax.fori_loop(1, num_nodes, step, states_BM)",
        "    return states_BM",
        f"{_DECODING}::test_no_strategy_changes_a_bit[prompt_lookup]",
    ),
    Fault(
        "a row's state stays after a step",
        _ON_DEVICE,
        "    return jax.lax.fori_loop(0, tokens_BM.shape[1], advance, states_B)",
        "    return states_B",
        f"{_DECODING}::test_texts_follow_their_grammar",
    ),
    Fault(
        "a ban outweighs the grammar",
        _ON_DEVICE,
        "jnp.maximum(logits_MV, _LEAST)",
        "logits_MV",
        f"{_DECODING}::test_what_may_come_outweighs_a_ban",
    ),
    Fault(
        "what must come is no draft",
        "jaxinfer/decoding/step.py",
        'if strategy.acceptance == "match":\n        tree = with',
        'if strategy.acceptance == "none":\n        tree = with',
        f"{_DECODING}::test_a_token_that_must_come_is_a_draft_that_cannot_fail",
    ),
    Fault(
        "a row that is computed anew begins its grammar anew",
        "jaxinfer/engine/device.py",
        "entry.sampling.grammar.after(entry.tokens[entry.prompt_length :])",
        "0",
        f"{_DECODING}::test_the_engine_keeps_to_grammars_while_requests_come_and_go",
    ),
)
