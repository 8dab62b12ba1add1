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
from train.loop.checkpoints import Checkpoints
from train.loop.fit import METRICS, claim_folder, read_metrics

# A run that depends on all there is: parameters, moments, the order of the data, noise, and the best evaluation.
PROGRAM = """
import sys, time
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np, optax
from jaxinfer.parallel.mesh import parse_mesh
from train.loop.fit import FitSettings, fit
from train.loop.step import Schedule, StepSettings, Tally, TrainState, compile_step
from train.texts.packing import Order

folder, pause, limit = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
if limit:
    import resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
data = np.random.default_rng(0).standard_normal((12, 8)).astype(np.float32)
order = Order(12, 2, seed=4)

def loss(params, frozen, batch, key):
    noise = jax.random.normal(key, batch.shape)
    errors = jnp.square(batch @ params["w"] - noise @ frozen)
    return Tally(jnp.sum(errors), jnp.float32(batch.shape[0]))

def batch_at(step):
    if limit and step == 8:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    time.sleep(pause)
    return data[order.at(step)][None]

optimizer = Schedule(num_steps=24, peak_rate=0.1).build_optimizer()
params = {"w": jax.random.normal(jax.random.key(9), (8, 600)), "idle": jnp.arange(3.0)}
state = TrainState(jnp.int32(0), params, optimizer.init(params))
settings = FitSettings(folder, 24, save_every=2, keep=2, log_every=1, eval_every=3, identity={"run": 1})
from train.command import run_command
def run(options):
    frozen = jnp.ones((8, 600)) * 0.3
    evaluate = lambda params: {"score": float(jnp.sum(params["w"]))}
    step = compile_step(loss, optimizer, StepSettings(seed=5))
    result = fit(step, state, frozen, batch_at, settings, evaluate)
    np.savez(folder / "result.npz", best_step=result.best_step, **result.params)
    return 130 if result.interrupted else 0
sys.exit(run_command("trial", "", lambda parser: None, run, []))
"""


def start(folder: Path, *, pause: float = 0.0, limit: int = 0) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "xla")}
    command = [sys.executable, "-c", PROGRAM, str(folder), str(pause), str(limit)]
    root = Path(__file__).parents[3]
    return subprocess.Popen(command, env=environment, cwd=root, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=600)
    return process.returncode, errors.decode()


def wait_for_steps(folder: Path, process: subprocess.Popen[bytes], count: int) -> None:
    while process.poll() is None and len(read_metrics(folder / METRICS)) < count:
        time.sleep(0.01)


def figures(folder: Path) -> list[dict]:
    return [
        {key: value for key, value in line.items() if key != "tokens_per_second"}
        for line in read_metrics(folder / METRICS)
    ]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    code, errors = finish(start(folder))
    assert (code, errors) == (0, "")
    return folder


def assert_same_result(folder, expected):
    one, other = np.load(folder / "result.npz"), np.load(expected / "result.npz")
    assert one.files == other.files
    for name in one.files:
        np.testing.assert_array_equal(one[name], other[name])
    assert figures(folder) == figures(expected)


def test_a_killed_run_ends_as_an_uninterrupted_one(uninterrupted, tmp_path):
    """Killed twice, wherever it was; the record of metrics too is the same, line by line."""
    folder = tmp_path / "run"
    for count in (5, 14):
        process = start(folder, pause=0.05)
        wait_for_steps(folder, process, count)
        process.send_signal(signal.SIGKILL)
        assert finish(process)[0] == -signal.SIGKILL
    assert finish(start(folder)) == (0, "")
    assert_same_result(folder, uninterrupted)


def test_an_interrupt_saves_and_stops_and_the_run_goes_on(uninterrupted, tmp_path):
    folder = tmp_path / "run"
    process = start(folder, pause=0.1)
    wait_for_steps(folder, process, 6)
    process.send_signal(signal.SIGINT)
    code, errors = finish(process)
    assert (code, errors) == (130, "interrupted: saving a checkpoint\n")
    last = max(line["step"] for line in figures(folder))
    assert str(last) in os.listdir(folder / "checkpoints")
    assert finish(start(folder)) == (0, "")
    assert_same_result(folder, uninterrupted)


def test_a_write_that_fails_leaves_the_last_checkpoint_to_go_on_from(uninterrupted, tmp_path):
    folder = tmp_path / "run"
    code, errors = finish(start(folder, limit=5000))
    assert (code, errors) == (
        2,
        f"error: {folder}/checkpoints: File too large; the last whole checkpoint is intact\n",
    )
    assert finish(start(folder)) == (0, "")
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


def test_a_checkpoint_of_other_shapes_is_told_in_one_line(tmp_path):
    program = (
        "import sys; from pathlib import Path; import numpy as np; from train.loop.checkpoints import Checkpoints\n"
        "from train.command import run_command\n"
        "def run(options):\n"
        "    checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)\n"
        "    checkpoints.save(1, {name: np.zeros(4) for name in 'abc'})\n"
        "    checkpoints.wait()\n"
        "    checkpoints.restore({name: np.zeros(5) for name in 'abc'})\n"
        "sys.exit(run_command('trial', '', lambda parser: None, run, []))\n"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", program, str(tmp_path / "checkpoints")]
    process = subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[3], stderr=subprocess.PIPE)
    code, errors = finish(process)
    assert code == 2
    assert errors.startswith(f"error: {tmp_path / 'checkpoints' / '1'}: the checkpoint cannot be read (")
    assert errors.count("\n") == 1


def test_a_damaged_checkpoint_is_told_in_one_line_and_can_be_removed(uninterrupted, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder)
    last = max((folder / "checkpoints").iterdir(), key=lambda path: int(path.name))
    for path in last.rglob("d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    code, errors = finish(start(folder))
    assert code == 2
    assert errors.startswith(f"error: {last}: the checkpoint cannot be read (")
    assert errors.endswith("; remove its folder to go on from the one before\n")
    assert errors.count("\n") == 1
    shutil.rmtree(last)
    assert finish(start(folder)) == (0, "")
    assert_same_result(folder, uninterrupted)


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
