"""Faults of grammars: their automata, tables, states along trees, and what may come."""

from tests.mutants.fault import Fault

_TABLE, _DECODING = "tests/grammar/test_table.py", "tests/grammar/test_decoding.py"
_DRAWING = "tests/sampling/test_grammar.py"
_ON_DEVICE = "jaxinfer/sampling/grammar.py"
_SCHEMAS, _SCHEMA = "tests/grammar/test_schemas.py", "jaxinfer/grammar/schema"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a text may end where a longer one may",
        "jaxinfer/grammar/compiling.py",
        'f"{_BEGIN}(?:{pattern}){_END}"',
        'f"{_BEGIN}(?:{pattern}){_END}?"',
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
        "states that no longer go on alike stay joined",
        "jaxinfer/grammar/automaton.py",
        "moves = ~(is_largest & is_whole[block_of_group])",
        "moves = ~is_largest",
        "tests/grammar/test_automaton.py::test_the_smallest_automaton_has_the_same_words_and_no_two_states_alike",
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
        "jaxinfer/decoding/trees/forced.py",
        "states_BM.at[:, node].set(states_after(arrays, above_B, token_B))",
        "states_BM",
        f"{_DECODING}::test_no_strategy_changes_a_bit[prompt_lookup]",
    ),
    Fault(
        "all nodes of a tree whose tokens nothing forces have the root's state",
        _ON_DEVICE,
        "    return jax.lax.fori_loop(1, num_nodes, step, states_BM)",
        "    return states_BM",
        f"{_DRAWING}::test_the_state_at_a_node_is_that_after_its_path",
    ),
    Fault(
        "a row's state stays after a step",
        _ON_DEVICE,
        "    return jnp.where(ends_B, states_after(arrays, there_B, token_B), there_B)",
        "    return there_B",
        f"{_DECODING}::test_texts_follow_their_grammar",
    ),
    Fault(
        "a row that stops on its path has the state of the node before",
        _ON_DEVICE,
        "last_B1 = jnp.where(ends_B, count_B - 1, count_B)[:, None]",
        "last_B1 = jnp.maximum(count_B - 1, 0)[:, None]",
        f"{_DRAWING}::test_the_state_after_a_path_is_that_after_its_tokens_one_by_one",
    ),
    Fault(
        "nodes behind the 32nd of a tree may have no token",
        _ON_DEVICE,
        "width = min(32, num_nodes)",
        "width = num_nodes",
        f"{_DRAWING}::test_the_best_token_that_may_come_is_drawn[33]",
    ),
    Fault(
        "a grammar counts only where other parameters change logits too",
        "jaxinfer/sampling/draw.py",
        "lax.cond(restricts_any(states_BM), among_some,",
        "lax.cond(restricts_any(states_BM) & False, among_some,",
        f"{_DRAWING}::test_the_best_token_that_may_come_is_drawn[1]",
    ),
    Fault(
        "a row has what another row's grammar lets come",
        "jaxinfer/ops/cpu_kernels/best.py",
        'code.arithmetic("mul", row, kinds)',
        'code.arithmetic("mul", group, kinds)',
        "tests/ops/test_cpu_kernels.py::test_whatever_the_pool_does_the_best_of_classes_are_found",
    ),
    Fault(
        "a ban outweighs the grammar",
        _ON_DEVICE,
        "jnp.maximum(logits_BMV, _LEAST)",
        "logits_BMV",
        f"{_DECODING}::test_what_may_come_outweighs_a_ban",
    ),
    Fault(
        "what must come is no draft",
        "jaxinfer/decoding/step.py",
        'if strategy.acceptance == "match":\n        tree, states_BM = with',
        'if strategy.acceptance == "none":\n        tree, states_BM = with',
        f"{_DECODING}::test_a_token_that_must_come_is_a_draft_that_cannot_fail",
    ),
    Fault(
        "a row that is computed anew begins its grammar anew",
        "jaxinfer/engine/device.py",
        "entry.sampling.grammar.after(entry.tokens[entry.prompt_length :])",
        "0",
        f"{_DECODING}::test_the_engine_keeps_to_grammars_while_requests_come_and_go",
    ),
    Fault(
        "a number may reach a bound that is open",
        f"{_SCHEMA}/numbers.py",
        'return low in (None, ("", False)) and',
        'return low in (None, ("", False), ("", True)) and',
        f"{_SCHEMAS}::test_numbers_are_those_between_their_bounds",
    ),
    Fault(
        "integers of the last length have no upper bound",
        f"{_SCHEMA}/numbers.py",
        "high = 10**length - 1 if most is None else min(most, 10**length - 1)",
        "high = 10**length - 1",
        f"{_SCHEMAS}::test_integers_are_those_between_their_bounds",
    ),
    Fault(
        "a pattern's quote ends the string",
        f"{_SCHEMA}/strings.py",
        "_WRITTEN = {'\"': '\\\\\"', ",
        "_WRITTEN = {",
        f"{_SCHEMAS}::test_every_way_through_a_schema_is_valid",
    ),
    Fault(
        "the name of a property is written as it is",
        f"{_SCHEMA}/translation.py",
        'found.append((f"{literal(name)}:',
        'found.append((f"\\"{name}\\":',
        f"{_SCHEMAS}::test_every_way_through_a_schema_is_valid",
    ),
    Fault(
        "a reference is not read as a part of an address",
        f"{_SCHEMA}/merging.py",
        "unquote(name)",
        "name",
        f"{_SCHEMAS}::test_every_way_through_a_schema_is_valid",
    ),
    Fault(
        "keywords that are not implemented are overlooked",
        f"{_SCHEMA}/keywords.py",
        "        if keyword in _REFUSED:",
        "        if keyword in ():",
        f"{_SCHEMAS}::test_what_is_not_followed_is_refused_by_its_place",
    ),
    Fault(
        "oneOf is anyOf",
        f"{_SCHEMA}/exclusion.py",
        '    if kinds & others != {"object"}:\n        return False\n',
        "    if kinds:\n        return True\n",
        f"{_SCHEMAS}::test_what_is_not_followed_is_refused_by_its_place",
    ),
    Fault(
        "a part's alternatives become those of the whole",
        "jaxinfer/grammar/compiling.py",
        'parts = [f"(?:{_pattern(*part)})" for part in given]',
        "parts = [_pattern(*part) for part in given]",
        "tests/grammar/test_table.py::test_grammars_are_parts_of_others",
    ),
)
