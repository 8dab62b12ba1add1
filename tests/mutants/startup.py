"""Faults of what is kept between processes: names that forget something, and folders that are trusted too far."""

from tests.mutants.fault import Fault

_FOLDER, _SPELLING = "jaxinfer/kept/folder.py", "jaxinfer/kept/spelling.py"
_PROGRAMS, _PARAMS = "jaxinfer/decoding/kept_programs.py", "jaxinfer/checkpoint/kept_params.py"
_DRAFTERS = "tests/decoding/strategies/test_kept_drafters.py"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a folder is trusted that all can write",
        _FOLDER,
        "stat.S_IMODE(found.st_mode) & 0o077",
        "stat.S_IMODE(found.st_mode) & 0o070",
        "tests/kept/test_folder.py",
    ),
    Fault(
        "what belongs to another user is trusted",
        _FOLDER,
        "if found.st_uid != os.geteuid():",
        "if found.st_uid < 0:",
        "tests/kept/test_folder.py",
    ),
    Fault(
        "a file is written under its own name at once",
        _FOLDER,
        'unfinished = f"{_UNFINISHED}{secrets.token_hex(8)}"',
        "unfinished = name",
        "tests/kept/test_folder.py",
    ),
    Fault(
        "a program's name forgets the arguments' dtypes",
        _PROGRAMS,
        'f"{found.dtype}{list(found.shape)}',
        'f"{list(found.shape)}',
        "tests/decoding/programs/test_kept_programs.py::test_all_that_a_program_depends_on_is_in_its_name",
    ),
    Fault(
        "a program's name forgets which arguments it consumes",
        _PROGRAMS,
        "repr(donated), str(structure)",
        "str(structure)",
        "tests/decoding/programs/test_kept_programs.py::test_all_that_a_program_depends_on_is_in_its_name",
    ),
    Fault(
        "fields that are not compared are not spelled",
        _SPELLING,
        "for field in dataclasses.fields(value)]",
        "for field in dataclasses.fields(value) if field.compare]",
        "tests/kept/test_spelling.py",
    ),
    Fault(
        "constants are spelled by type only",
        _SPELLING,
        "if id(value) in arguments:",
        "if True:",
        "tests/kept/test_spelling.py",
    ),
    Fault(
        "changed conditions go unseen",
        "jaxinfer/kept/conditions.py",
        "return found != expected",
        "return False",
        "tests/checkpoint/test_kept_params.py",
    ),
    Fault(
        "converted weights outlive the file that they were made of",
        _PARAMS,
        "return found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev",
        "return found.st_size, 0, 0, 0",
        "tests/checkpoint/test_kept_params.py",
    ),
    Fault(
        "what a model drafts with is kept for any model",
        _PARAMS,
        'digest("made of", fingerprint(params), spell(layout()))',
        'digest("made of", spell(layout()))',
        _DRAFTERS,
    ),
    Fault(
        "heads are kept by their files' names",
        _SPELLING,
        "f\"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\"",
        "path.name",
        _DRAFTERS,
    ),
    Fault(
        "panels that are kept no longer draft",
        _PARAMS,
        "panels = [value.num_outputs, value.drafts]",
        "panels = [value.num_outputs, False]",
        _DRAFTERS,
    ),
    Fault(
        "what a drafter shares with the model is kept once more",
        "jaxinfer/decoding/drafting/loaded_model.py",
        "shares_much = few_bits.only_experts or form.kept is not None",
        "shares_much = False",
        _DRAFTERS,
    ),
    Fault(
        "drafts by rejection are of weights that a fingerprint tells apart",
        "jaxinfer/decoding/strategies/draft_model.py",
        'own = target if self.acceptance == "match" else target._replace(made_once=made_anew)',
        "own = target",
        _DRAFTERS,
    ),
    Fault(
        "what is empty is forgotten",
        _PARAMS,
        "if isinstance(value, Mapping | tuple) and not value:",
        "if False:",
        _DRAFTERS,
    ),
)
