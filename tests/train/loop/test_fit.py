"""A run that is killed, interrupted or out of disk goes on from its last checkpoint as if nothing had been."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxinfer.errors import InvalidCheckpoint, InvalidOption, WriteFailed
from tests.train.loop.trial import NUM_STEPS, trial
from train.loop.checkpoints import Checkpoints
from train.loop.fit import METRICS, claim_folder, read_metrics

ROOT = Path(__file__).parents[3]


def figures(folder: Path) -> list[dict]:
    return [
        {key: value for key, value in line.items() if key != "tokens_per_second"}
        for line in read_metrics(folder / METRICS)
    ]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert trial(folder) == 0
    return folder


def assert_same_result(folder, expected):
    one, other = np.load(folder / "result.npz"), np.load(expected / "result.npz")
    assert one.files == other.files
    for name in one.files:
        np.testing.assert_array_equal(one[name], other[name])
    assert figures(folder) == figures(expected)


def test_the_best_parameters_are_the_result(uninterrupted):
    scores = {line["step"]: line["evaluation"]["score"] for line in figures(uninterrupted) if "evaluation" in line}
    best = max(scores, key=lambda step: scores[step])
    found = np.load(uninterrupted / "result.npz")
    assert (found["best_step"], best < NUM_STEPS) == (best, True)
    assert np.sum(found["w"]) == pytest.approx(scores[best])


class Stopped(Exception):
    """Ends a run at once, wherever it is."""


def at(number, act):
    return lambda step: act() if step == number else None


def stop():
    raise Stopped


def test_a_run_that_is_stopped_twice_ends_as_an_uninterrupted_one(uninterrupted, tmp_path):
    """Between two checkpoints and right after one; the record of metrics too is the same, line by line."""
    folder = tmp_path / "run"
    for number in (5, 14):
        with pytest.raises(Stopped):
            trial(folder, at(number, stop))
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["12", "14"]  # the last two are kept
    assert trial(folder) == 0
    assert_same_result(folder, uninterrupted)


@pytest.mark.slow
def test_a_killed_run_ends_as_an_uninterrupted_one(uninterrupted, tmp_path):
    """Killed twice, wherever it was; the record of metrics too is the same, line by line."""
    folder = tmp_path / "run"
    for count in (5, 14):
        command = [sys.executable, "-m", "tests.train.loop.trial", str(folder), "0.05"]
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)
        while process.poll() is None and len(read_metrics(folder / METRICS)) < count:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=600)
        assert process.returncode == -signal.SIGKILL
    assert trial(folder) == 0
    assert_same_result(folder, uninterrupted)


def test_an_interrupt_saves_and_stops_and_the_run_goes_on(uninterrupted, tmp_path, capsys):
    folder = tmp_path / "run"
    assert trial(folder, at(6, lambda: os.kill(os.getpid(), signal.SIGINT))) == 130
    assert capsys.readouterr().err == "interrupted: saving a checkpoint\n"
    last = max(line["step"] for line in figures(folder))
    assert last == 7
    assert str(last) in os.listdir(folder / "checkpoints")
    assert trial(folder) == 0
    assert_same_result(folder, uninterrupted)


# In a process of its own, as Orbax's threads write to its standard error. No file may grow past 5,000 bytes from step 8
# on; then a run's last checkpoint is damaged, and one is of other shapes.
FAILURES = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from tests.train.loop.trial import trial
from train.command import run_command
from train.loop.checkpoints import Checkpoints

full, damaged, other = map(Path, sys.argv[1:])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
before = resource.getrlimit(resource.RLIMIT_FSIZE)
limit = lambda step: resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1])) if step == 8 else None
codes = [trial(full, limit)]
resource.setrlimit(resource.RLIMIT_FSIZE, before)
codes.append(trial(damaged))

def restore_others(options):
    checkpoints = Checkpoints(other, keep=2)
    checkpoints.save(1, {name: np.zeros(4) for name in "abc"})
    checkpoints.wait()
    checkpoints.restore({name: np.zeros(5) for name in "abc"})

codes.append(run_command("trial", "", lambda parser: None, restore_others, []))
print(codes)
"""


@pytest.mark.slow
def test_failures_of_the_disk_are_one_line_each_and_leave_a_checkpoint_to_go_on_from(uninterrupted, tmp_path):
    full, damaged, other = (tmp_path / name for name in ("full", "damaged", "other"))
    shutil.copytree(uninterrupted, damaged)
    last = max((damaged / "checkpoints").iterdir(), key=lambda path: int(path.name))
    for path in last.rglob("d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    command = [sys.executable, "-c", FAILURES, *map(str, (full, damaged, other))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, "[2, 2, 2]\n"), done.stderr
    told_full, told_damaged, told_other = done.stderr.splitlines()
    assert told_full == f"error: {full}/checkpoints: File too large; the last whole checkpoint is intact"
    assert told_damaged.startswith(f"error: {last}: the checkpoint cannot be read (")
    assert told_damaged.endswith("; remove its folder to go on from the one before")
    assert told_other.startswith(f"error: {other / '1'}: the checkpoint cannot be read (")
    shutil.rmtree(last)
    for folder in (full, damaged):
        assert trial(folder) == 0
        assert_same_result(folder, uninterrupted)


def test_a_full_disk_is_told_before_it_is_written_to(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    checkpoints.save(1, {"w": np.arange(4.0)})
    checkpoints.wait()
    monkeypatch.setattr("train.loop.checkpoints.shutil.disk_usage", lambda path: SimpleNamespace(free=31))
    with pytest.raises(WriteFailed, match=r"No space left .* last whole checkpoint is intact"):
        checkpoints.save(2, {"w": np.arange(4.0)})
    assert checkpoints.latest() == 1
    np.testing.assert_array_equal(checkpoints.restore({"w": np.zeros(4)})["w"], np.arange(4.0))
    checkpoints.close()


def test_a_folder_of_another_run_is_refused(tmp_path):
    claim_folder(tmp_path / "run", {"base": "aa", "steps": 3})
    claim_folder(tmp_path / "run", {"base": "aa", "steps": 3})
    with pytest.raises(InvalidCheckpoint, match="holds a run with base 'aa', not 'bb'; give another --out"):
        claim_folder(tmp_path / "run", {"base": "bb", "steps": 3})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(InvalidOption, match="exists and holds no run"):
        claim_folder(tmp_path / "other", {})
    (tmp_path / "run" / "run.json").write_text("{")
    with pytest.raises(InvalidCheckpoint, match=r"run\.json: broken JSON"):
        claim_folder(tmp_path / "run", {})


def test_a_half_line_of_metrics_is_left_out(tmp_path):
    path = tmp_path / METRICS
    path.write_text(json.dumps({"step": 1}) + '\n{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1}]
