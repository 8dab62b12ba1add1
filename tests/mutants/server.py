"""Faults of the server: fields, streams, errors, clients that leave, keys, the end."""

from tests.mutants.fault import Fault

_API, _HTTP = "jaxinfer/server/api", "jaxinfer/server/http"
_ENDPOINTS, _SERVING = "jaxinfer/server/endpoints.py", "jaxinfer/server/serving.py"
_FIELDS, _ANSWERS, _ERRORS = (f"tests/server/test_{name}.py" for name in ("fields", "answers", "errors"))
_LAW, _LIFETIME, _METRICS = (f"tests/server/test_{name}.py" for name in ("law", "lifetime", "metrics"))
_LOG = "tests/server/test_log.py"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a field that nobody knows is ignored",
        f"{_API}/fields.py",
        "            if field not in self._taken:",
        "            if field in ():",
        f"{_FIELDS}::test_all_other_fields_are_refused_by_name",
    ),
    Fault(
        "true counts as the number 1",
        f"{_API}/fields.py",
        "        if isinstance(value, bool) or not isinstance(value, int):\n            raise self.wrong_type",
        "        if not isinstance(value, int):\n            raise self.wrong_type",
        f"{_FIELDS}::test_wrong_values_are_refused_by_the_name_of_their_field",
    ),
    Fault(
        "a prompt may take the whole context",
        f"{_API}/sampling.py",
        "(job.max_tokens or 1) > limits",
        "(job.max_tokens or 0) > limits",
        f"{_FIELDS}::test_prompts_that_leave_no_room_are_too_long",
    ),
    Fault(
        "the last of two equal names wins",
        f"{_HTTP}/json_text.py",
        "    if len(made) < len(pairs):",
        "    if len(made) > len(pairs):",
        f"{_FIELDS}::test_what_is_no_json_object_is_refused",
    ),
    Fault(
        "every chunk names the role",
        f"{_API}/chat.py",
        'return self._chunk(choice, {"content": text}, None',
        'return self._chunk(choice, {"role": "assistant", "content": text}, None',
        f"{_ANSWERS}::test_a_stream_joins_to_the_whole_answer",
    ),
    Fault(
        "a stream gives all log-probabilities anew",
        f"{_API}/completions.py",
        '"token_logprobs": choice.logprobs[start:],',
        '"token_logprobs": choice.logprobs,',
        f"{_ANSWERS}::test_a_stream_joins_to_the_whole_answer",
    ),
    Fault(
        "the samples of a second prompt are put with those of the first",
        "jaxinfer/server/generation.py",
        "number * self._num_samples + piece.sample",
        "number + piece.sample",
        f"{_ANSWERS}::test_several_prompts_and_samples_come_in_order",
    ),
    Fault(
        "a drawn seed is told wrongly",
        _ENDPOINTS,
        "served.system_fingerprint, job.sampling.seed)",
        "served.system_fingerprint, job.sampling.seed ^ 1)",
        f"{_ANSWERS}::test_without_a_seed_answers_differ_and_the_seed_that_is_told_gives_them_again",
    ),
    Fault(
        "whoever leaves is served to the end",
        f"{_HTTP}/events.py",
        "asyncio.wait({task, gone}, return_when",
        "asyncio.wait({task}, return_when",
        f"{_ERRORS}::test_who_leaves_ends_the_request_within_a_second",
    ),
    Fault(
        "of several prompts, those that were taken run on when one is refused",
        "jaxinfer/server/generation.py",
        "        for request in requests:\n            request.cancel()\n        raise",
        "        raise",
        f"{_ERRORS}::test_of_several_prompts_none_runs_when_one_is_refused",
    ),
    Fault(
        "a body may be of any size",
        f"{_HTTP}/body.py",
        "    if size > most_bytes:\n        message",
        "    if size > 2**40:\n        message",
        f"{_ERRORS}::test_bodies_that_are_no_json_or_too_long",
    ),
    Fault(
        "a form of another page's is taken",
        f"{_HTTP}/body.py",
        '    if kind != "application/json":',
        '    if kind == "application/xml":',
        f"{_ERRORS}::test_bodies_that_are_no_json_or_too_long",
    ),
    Fault(
        "the hash of a key lets in as the key does",
        f"{_HTTP}/keys.py",
        "        given = hash_key(key)\n",
        '        given = bytes.fromhex(key[7:]) if key.startswith("sha256:") else hash_key(key)\n',
        f"{_ERRORS}::test_keys",
    ),
    Fault(
        "more bytes of a head give more time",
        f"{_HTTP}/protocol.py",
        "        elif self._head_timer is None:\n",
        "        else:\n            _stop(self._head_timer)\n",
        f"{_ERRORS}::test_slow_clients_are_left",
    ),
    Fault(
        "a client that does not read is waited for",
        f"{_HTTP}/protocol.py",
        "self._write_timer or self.loop.call_later(self.write_seconds, self._abort)",
        "self._write_timer or self.loop.call_later(1000 * self.write_seconds, self._abort)",
        f"{_ERRORS}::test_clients_that_do_not_read_are_left",
    ),
    Fault(
        "a draining server takes requests",
        "jaxinfer/server/served.py",
        "        if self.is_draining:\n            raise not_ready",
        "        if not self.engine.is_open:\n            raise not_ready",
        f"{_LIFETIME}::test_a_signal_ends_admission_and_what_runs_is_finished",
    ),
    Fault(
        "a signal ends what runs",
        _SERVING,
        "                while live:\n                    await asyncio.sleep(_LOOK_SECONDS)\n        for generation",
        "                pass\n        for generation",
        f"{_LIFETIME}::test_a_signal_ends_admission_and_what_runs_is_finished",
    ),
    Fault(
        "a second signal is like the first",
        _SERVING,
        "            self._leave(128 + number)\n",
        "",
        f"{_LIFETIME}::test_a_second_signal_ends_at_once",
    ),
    Fault(
        "an engine that waits for nothing is stuck",
        "jaxinfer/server/progress.py",
        "if not waits_alone or done != self._last:",
        "if done != self._last:",
        f"{_METRICS}::test_an_engine_is_stuck_where_requests_wait_and_nothing_runs",
    ),
    Fault(
        "every path of a stranger's is a series",
        "jaxinfer/server/gate.py",
        'scope["path"] if scope["path"] in self._paths else "other"',
        'scope["path"]',
        f"{_METRICS}::test_paths_of_strangers_make_no_new_series",
    ),
    Fault(
        "top_k is checked, and forgotten",
        f"{_API}/sampling.py",
        "        top_k=max(top_k, 0),",
        "        top_k=0,",
        f"{_FIELDS}::test_implemented_fields_arrive",
    ),
    Fault(
        "replaying compares log-probabilities to six digits",
        "jaxinfer/server/log/replay.py",
        "before[1].hex() != now[1].hex()",
        "abs(before[1] - now[1]) > 1e-6",
        f"{_LOG}::test_a_log_is_replayed_with_the_same_bits_and_any_other_bit_is_found",
    ),
    Fault(
        "what was ended early must be whole",
        "jaxinfer/server/log/replay.py",
        "        again = again[: len(pairs)]\n",
        "        pass\n",
        f"{_LOG}::test_every_way_to_differ_is_found",
    ),
    Fault(
        "a full disk leaves half a line",
        "jaxinfer/server/log/writer.py",
        "            if stat.S_ISREG(before.st_mode):\n",
        "            if not before:\n",
        f"{_LOG}::test_a_full_disk_is_told_once_and_leaves_whole_lines",
    ),
    Fault(
        "answers wait for the log's disk",
        "jaxinfer/server/log/writer.py",
        "            self._waiting.put_nowait(entry)\n",
        "            self._waiting.put(entry)\n",
        f"{_LOG}::test_a_disk_that_is_too_slow_keeps_nobody_waiting",
    ),
    Fault(
        "a log writes texts unasked",
        "jaxinfer/server/log/entry.py",
        'return values if decode is None else {**values, "text": decode(ids)}',
        'return {**values, "text": (decode or (lambda ids: bytes(i - 2 for i in ids if i > 1).decode()))(ids)}',
        f"{_LOG}::test_texts_are_written_only_where_they_are_asked_for",
    ),
)
