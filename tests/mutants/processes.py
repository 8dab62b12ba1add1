"""Faults of an engine on devices of several processes: what the leader tells, and what followers do."""

from tests.mutants.fault import Fault

_LED, _FOLLOWS = "jaxinfer/engine/led_device.py", "tests/engine/test_led_device.py"
_SAME = f"{_FOLLOWS}::test_the_follower_holds_what_the_leader_holds[autoregressive]"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a follower is not told of a page that is copied to the host",
        _LED,
        "        self._say(name, number, what)\n",
        "",
        _SAME,
    ),
    Fault(
        "a follower's windows have one step less",
        _LED,
        '"start", slots, pages, max_steps,',
        '"start", slots, pages, max_steps - 1,',
        _SAME,
    ),
    Fault(
        "followers keep what was saved for ever",
        _LED,
        "                self._saved.pop(number, None)\n",
        "",
        _SAME,
    ),
    Fault(
        "a follower goes on after a call that failed here alone",
        _LED,
        'if failed is not None and call.name != "reset":',
        "if False:",
        f"{_FOLLOWS}::test_a_call_that_fails_here_alone_is_told_and_ends_the_process",
    ),
    Fault(
        "a follower that failed alone waits for ever",
        _LED,
        "time.monotonic() - began > _RESET_SECONDS",
        "False",
        f"{_FOLLOWS}::test_a_call_that_fails_here_alone_ends_the_process_if_nothing_comes",
    ),
    Fault(
        "a leader that cannot begin leaves its followers waiting",
        "jaxinfer/engine/assembly.py",
        "        tell(None)\n",
        "",
        f"{_FOLLOWS}::test_a_leader_that_cannot_begin_lets_its_followers_end",
    ),
    Fault(
        "what could not be kept is missed by nobody",
        _LED,
        "            if self._unsaved:\n",
        "            if False:\n",
        f"{_FOLLOWS}::test_what_cannot_be_kept_here_ends_the_process_unless_the_leader_has_not_kept_it_either",
    ),
    Fault(
        "a follower never begins anew",
        _LED,
        'if failed is not None and call.name != "reset":',
        "if failed is not None:",
        f"{_FOLLOWS}::test_a_call_that_fails_on_both_sides_is_followed_by_a_new_beginning",
    ),
)
