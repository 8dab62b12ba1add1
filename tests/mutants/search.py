"""Faults of tree search: which texts it asks about, what they are worth, and whose noise it takes."""

from tests.mutants.fault import Fault

_NODES, _STEP = "jaxinfer/decoding/search/nodes.py", "jaxinfer/decoding/search/step.py"
_TESTS = "tests/decoding/search/test_mcts.py::"
_ASKED = f"{_TESTS}test_every_search_asks_about_plain_continuations_of_new_nodes"
_PLAIN = f"{_TESTS}test_a_value_that_is_the_same_for_all_texts_leaves_the_text_of_plain_decoding"
_HEAD = f"{_TESTS}test_a_value_head_reads_the_last_token_of_each_text_but_no_stop_token"
_END = f"{_TESTS}test_a_search_ends_a_text_where_that_is_worth_most"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a node of a search stands in its parent's slot",
        _NODES,
        "placement._replace(slots_BT=(start_B + node)[:, None])",
        "placement._replace(slots_BT=(start_B + node - (node > 1))[:, None])",
        _ASKED,
    ),
    Fault(
        "a search sees other nodes than those on the path",
        _NODES,
        "for placement in held.cache.place(start_B, place.path_BM[:, None])",
        "for placement in held.cache.place(start_B, jnp.ones_like(place.path_BM)[:, None])",
        _ASKED,
    ),
    Fault(
        "a search tries tokens without the noise that plain decoding draws with",
        _STEP,
        'with_noise=strategy.policy == "gumbel")',
        "with_noise=False)",
        _PLAIN,
    ),
    Fault(
        "a text in a search goes on past its end",
        _NODES,
        "goes_on_B = ~place.ended_B\n",
        "goes_on_B = place.ended_B | True\n",
        _END,
    ),
    Fault(
        "an end in a search is worth nothing",
        _STEP,
        "reward=jnp.where(place.ended_B, leaf.value_B, nothing_B),",
        "reward=nothing_B,",
        _END,
    ),
    Fault(
        "what a search's function raises is lost",
        "jaxinfer/decoding/search/batch.py",
        "            calls.check(number)\n",
        "",
        f"{_TESTS}test_what_a_function_raises_or_returns_wrongly_comes_out_as_it_is",
    ),
    Fault(
        "a value head reads the token before a text's last",
        _NODES,
        "return step + 1, read_B | ended_B | played.place.stopped_B, played",
        "return step + 1, read_B | (step + 1 >= depth) | played.place.stopped_B, played",
        _HEAD,
    ),
    Fault(
        "a value head reads a stop token",
        _NODES,
        "return step + 1, read_B | ended_B | played.place.stopped_B, played",
        "return step + 1, read_B | ended_B, played",
        _HEAD,
    ),
)
