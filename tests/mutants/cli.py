"""Faults of the command line and of the language model under it: exit codes, what is printed where, what is read."""

from tests.mutants.fault import Fault

_MODEL, _TEXT = "jaxinfer/language_model.py", "jaxinfer/text_generation.py"
_REQUESTS = "jaxinfer/text_requests.py"
_CHECKS = "jaxinfer/model_checks.py"
_GENERATE, _CLI = "jaxinfer/cli/commands/generate.py", "tests/cli"
_LANGUAGE = "tests/test_language_model.py"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "an error is as long as what it quotes",
        "jaxinfer/errors.py",
        "    if len(line) <= _LONGEST:\n",
        "    if line:\n",
        "tests/test_bad_input.py::test_an_error_is_one_line_with_its_beginning_and_its_end",
    ),
    Fault(
        "an error quotes control characters",
        "jaxinfer/errors.py",
        "char if char.isprintable() else ascii(char)[1:-1]",
        "char",
        "tests/test_bad_input.py::test_an_error_is_one_line_with_its_beginning_and_its_end",
    ),
    Fault(
        "a strategy of any type is parsed",
        "jaxinfer/decoding/registry.py",
        "    if not isinstance(spec, str):\n",
        "    if spec is True:\n",
        "tests/test_bad_input.py::test_arguments_of_other_types_are_refused",
    ),
    Fault(
        "a closed standard input is read",
        "jaxinfer/cli/prompts.py",
        "        if sys.stdin is None:\n",
        "        if sys.stdin is False:\n",
        f"{_CLI}/test_mistakes.py::test_a_closed_standard_input_is_one_line",
    ),
    Fault(
        "JAX's own error about platforms passes",
        "jaxinfer/ops/backend.py",
        "    except (RuntimeError, ValueError) as error:  # a platform",
        "    except KeyError as error:  # a platform",
        f"{_CLI}/test_mistakes.py::test_a_platform_that_jax_does_not_know_is_one_line",
    ),
    Fault(
        "an audit that fails exits with 0",
        "jaxinfer/cli/commands/verify.py",
        "EXIT_UNEXPLAINED = 1",
        "EXIT_UNEXPLAINED = 0",
        f"{_CLI}/test_verify.py::test_a_strategy_that_changes_tokens_fails",
    ),
    Fault(
        "a bisection is refused after the audit",
        "jaxinfer/cli/commands/verify.py",
        "    if options.bisect:\n        check_bisects(model)\n",
        "",
        f"{_CLI}/test_verify.py::test_a_bisection_of_scanned_layers_is_one_line",
    ),
    Fault(
        "an interrupt exits as a mistake",
        "jaxinfer/cli/main.py",
        "return leave(EXIT_INTERRUPTED)",
        "return leave(EXIT_MISTAKE)",
        f"{_CLI}/test_generate.py::test_an_interrupt_keeps_the_text_and_exits_130",
    ),
    Fault(
        "a reader that left is told as a mistake",
        "jaxinfer/cli/main.py",
        "return end(EXIT_BROKEN_PIPE)",
        "return end(EXIT_MISTAKE)",
        f"{_CLI}/test_generate.py::test_output_that_cannot_be_written_ends_quietly[closed]",
    ),
    Fault(
        "mistakes go to standard output",
        "jaxinfer/cli/main.py",
        "file=error_stream(), flush=True)",
        "flush=True)",
        f"{_CLI}/test_mistakes.py::test_a_mistake_in_the_options_is_one_line[no such path]",
    ),
    Fault(
        "statistics go to standard output",
        _GENERATE,
        'for result in batch]), sep="\\n", file=sys.stderr)',
        'for result in batch]), sep="\\n")',
        f"{_CLI}/test_generate.py::test_stats_go_to_standard_error",
    ),
    Fault(
        "stop strings of the command are not passed on",
        "jaxinfer/cli/arguments.py",
        "return {name: value for name, value in given.items() if value is not None}",
        'return {name: value for name, value in given.items() if value is not None and name != "stop"}',
        f"{_CLI}/test_generate.py::test_every_stop_string_of_the_command_ends_the_text",
    ),
    Fault(
        "lines of JSON on standard input are prompts as they stand",
        "jaxinfer/cli/prompts.py",
        'is_plain = not line.lstrip().startswith("{")',
        "is_plain = True",
        f"{_CLI}/test_generate.py::test_standard_input_holds_a_prompt_a_line",
    ),
    Fault(
        "of several turns the last is the prompt",
        "jaxinfer/cli/prompts.py",
        "return turns[0]",
        "return turns[-1]",
        f"{_CLI}/test_generate.py::test_prompts_of_a_file_come_back_in_order_whatever_the_batch",
    ),
    Fault(
        "a bad line is numbered from nought",
        "jaxinfer/cli/prompts.py",
        "enumerate(file, 1)",
        "enumerate(file)",
        f"{_CLI}/test_mistakes.py::test_a_bad_line_of_prompts_is_named",
    ),
    Fault(
        "a full chat forgets one message at a time",
        "jaxinfer/cli/commands/chat.py",
        "del self.messages[self._num_fixed : self._num_fixed + 2]",
        "del self.messages[0:1]",
        f"{_CLI}/test_chat.py::test_a_full_context_forgets_the_oldest_turns_and_says_so",
    ),
    Fault(
        "an interrupted conversion leaves what it wrote",
        "jaxinfer/checkpoint/new_folder.py",
        "        finally:\n            _clear(new, old)",
        "        finally:\n            pass",
        f"{_CLI}/test_convert.py::test_an_interrupted_conversion_clears_up_and_ends_as_other_commands_do[before]",
    ),
    Fault(
        "a second conversion to a folder is refused once it has worked",
        "jaxinfer/cli/commands/convert.py",
        "claimed_destination(target, options.overwrite)",
        "claimed_destination(target.with_name(str(id(target))), options.overwrite)",
        f"{_CLI}/test_convert.py::test_a_second_conversion_is_refused_before_it_works",
    ),
    Fault(
        "layers that are kept go although the model does not fit without them",
        "jaxinfer/cli/commands/convert.py",
        "if free < needed <= free + held:",
        "if free < needed:",
        f"{_CLI}/test_convert.py::test_layers_make_room_for_the_model_where_both_do_not_fit",
    ),
    Fault(
        "all samples of a prompt are the first",
        _REQUESTS,
        "Request(ids, max_length, params, sample, adapter)) for sample in samples]",
        "Request(ids, max_length, params, sample * 0, adapter)) for sample in samples]",
        f"{_LANGUAGE}::test_samples_of_a_prompt_differ_and_repeat",
    ),
    Fault(
        "a prompt that fills the context is let through",
        _REQUESTS,
        "if len(ids) >= max_len:",
        "if len(ids) > max_len:",
        "tests/test_bad_input.py::test_generate_refuses[a prompt as long as the context]",
    ),
    Fault(
        "max_len beyond the model's context is let through",
        _CHECKS,
        "if max_len < 2 or (longest is not None and max_len > longest):",
        "if max_len < 2:",
        "tests/test_bad_input.py::test_load_refuses",
    ),
    Fault(
        "a token past the vocabulary is let through",
        _CHECKS,
        "if not 0 <= token < vocab_size), None)",
        "if not 0 <= token <= vocab_size), None)",
        "tests/test_bad_input.py::test_generate_refuses[an id outside the vocabulary]",
    ),
    Fault(
        "the token that completes a stop string is dropped",
        _TEXT,
        "del self.tokens[(self.stream.stop_token_index or 0) + 1 :]",
        "del self.tokens[(self.stream.stop_token_index or 0) :]",
        f"{_LANGUAGE}::test_a_stop_string_cuts_the_text_and_the_tokens",
    ),
    Fault(
        "a text that a stop string ended is told as too long",
        _TEXT,
        'finish_reason="stop" if row.is_cut or row.ends_by_token else "length"',
        'finish_reason="stop" if row.ends_by_token else "length"',
        f"{_LANGUAGE}::test_a_stop_string_cuts_the_text_and_the_tokens",
    ),
    Fault(
        "the last batch leaves out a prompt",
        _TEXT,
        "starts[first + size] if first + size < len(starts) else len(requests)",
        "starts[first + size] if first + size < len(starts) - 1 else len(requests) - 1",
        f"{_LANGUAGE}::test_more_prompts_than_a_batch_holds",
    ),
)
