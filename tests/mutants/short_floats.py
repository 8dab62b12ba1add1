"""Faults of short floats in caches, of passes of prefill, and of programs and files that several strategies share."""

from tests.mutants.fault import Fault

_WRITE, _BACKEND, _READ = (f"jaxinfer/ops/{name}.py" for name in ("cache_write", "backend", "attention"))
_SUMS, _CODE = (f"jaxinfer/ops/cpu_kernels/{name}.py" for name in ("weighted_sums", "attention_code"))
_PROGRAMS, _STEP = (f"jaxinfer/decoding/{name}.py" for name in ("programs", "step"))
_ANSWERS = "jaxinfer/decoding/drafting/past_answers.py"
_SHORT, _PASSES = "tests/cache/test_short_floats.py", "tests/decoding/test_prefill_passes.py"
_ATTENTION, _SUFFIX = "tests/ops/test_cpu_attention.py", "tests/decoding/strategies/test_suffix.py"
_WIDENED = f"{_ATTENTION}::test_float16_is_read_as_the_float32_that_it_is"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "keys that float16 does not have become infinite",
        _WRITE,
        "rows_BTI = jnp.clip(rows_BTI, -most, most)",
        "pass",
        f"{_SHORT}::test_numbers_that_float16_does_not_have_become_the_largest_that_it_has",
    ),
    Fault(
        "a cache is float16 though the processor does not widen it",
        _BACKEND,
        'vectors is not None and "float16" in vectors.dtypes else "float32"',
        'vectors is not None else "float32"',
        f"{_SHORT}::test_caches_are_float16_where_the_kernel_widens_it",
    ),
    Fault(
        "XLA rounds weights to what values are kept in",
        _READ,
        'elif widens and backend.platform == "cpu" and held_BSF.dtype != backend.compute_dtype:',
        "elif False:",
        f"{_SHORT}::test_xla_widens_what_it_reads",
    ),
    Fault(
        "values past the last column of float16 are read",
        _SUMS,
        "if whole or each < size - 1:",
        "if True:",
        _WIDENED,
    ),
    Fault(
        "columns of float16 that fill no vector are read as if they did",
        _SUMS,
        'is_whole = code.value(f"icmp eq i64 {last}, {lanes}")',
        'is_whole = code.value(f"icmp ne i64 {last}, 0")',
        _WIDENED,
    ),
    Fault(
        "the part in which slots end is left out",
        _CODE,
        'with code.repeated(f"{block}_part", 0, count, _AHEAD) as part:',
        'with code.repeated(f"{block}_part", 0, code.arithmetic("sub", count, _AHEAD - 1), _AHEAD) as part:',
        f"{_ATTENTION}::test_attention_of_any_shape",
    ),
    Fault(
        "scales of later parts are those of the first",
        _CODE,
        'return several, code.at(LLVM_TYPES[dtype], places, place), code.at("i8", scale, place)',
        "return several, code.at(LLVM_TYPES[dtype], places, place), scale",
        f"{_ATTENTION}::test_rows_in_bytes_are_read_as_the_numbers_that_they_stand_for",
    ),
    Fault(
        "the last pass of prefill is left out",
        _STEP,
        "jnp.clip(-(-jnp.max(lengths_B) // size), 1, most)",
        "jnp.clip(jnp.max(lengths_B) // size, 1, most)",
        f"{_PASSES}::test_passes_end_with_the_longest_prompt",
    ),
    Fault(
        "prefill passes over what no prompt has",
        _STEP,
        'if backend.platform == "cpu" else most',
        "if False else most",
        f"{_PASSES}::test_passes_end_with_the_longest_prompt",
    ),
    Fault(
        "programs whose first argument is of other shapes are one",
        _PROGRAMS,
        "counted = first.get(LOADED) if isinstance(first, Mapping) else first",
        "counted = first.get(LOADED) if isinstance(first, Mapping) else None",
        "tests/engine/test_strategies_in_turn.py",
    ),
    Fault(
        "what another process has added to a file of answers is lost",
        _ANSWERS,
        "held, mode = self._read(file), stat.S_IMODE(file.stat().st_mode)",
        "mode = stat.S_IMODE(file.stat().st_mode)",
        f"{_SUFFIX}::test_two_add_to_one_file",
    ),
    Fault(
        "a file of answers becomes as short as the last to write remembers",
        _ANSWERS,
        "[-max(self.size, held.size) :]",
        "[-self.size :]",
        f"{_SUFFIX}::test_two_add_to_one_file",
    ),
    Fault(
        "others may read a file of answers that its owner alone could",
        _ANSWERS,
        "os.fchmod(written.fileno(), mode)",
        "os.fchmod(written.fileno(), 0o644)",
        f"{_SUFFIX}::test_a_file_keeps_its_mode_and_a_link_its_file",
    ),
    Fault(
        "a link to a file of answers becomes a file",
        _ANSWERS,
        "file and file.resolve()",
        "file",
        f"{_SUFFIX}::test_a_file_keeps_its_mode_and_a_link_its_file",
    ),
)
