"""Loading fills every parameter from its tensor, within the stated memory, or fails before reading a weight."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfer.checkpoint.hf_folder import open_hf_folder
from jaxinfer.checkpoint.load import load_params
from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.errors import InvalidCheckpoint
from jaxinfer.models.families.family import TensorNames
from tests.checkpoint.weights import NAMES, abstract, tensors, write_folder


class Unread:
    """Tensors whose weights must not be read."""

    def __init__(self, shapes):
        self._shapes = shapes

    def shapes(self):
        return self._shapes

    def read(self, name, dtype):
        raise AssertionError(f"{name} was read before the checks were done")


def unread(made) -> Checkpoint:
    return Checkpoint("here", {}, Unread({name: array.shape for name, array in made.items()}))


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("target", [jnp.float32, jnp.bfloat16])
def test_each_parameter_holds_its_tensor(tmp_path, stacked, target):
    made = tensors() | {"model.layers.0.inv_freq": np.ones(2, np.float32)}
    params = load_params(open_hf_folder(write_folder(tmp_path, made)), NAMES, abstract(target, stacked=stacked))
    described = abstract(target, stacked=stacked)
    assert jax.tree.structure(params) == jax.tree.structure(described)
    assert jax.tree.all(jax.tree.map(lambda p, s: p.shape == s.shape and p.dtype == s.dtype, params, described))
    np.testing.assert_array_equal(params["embed"]["embedding"], made["model.embed.weight"].astype(target))
    for layer in range(3):
        blocks = params["blocks"]
        block = jax.tree.map(lambda p, i=layer: p[i], blocks) if stacked else blocks[f"layer_{layer}"]
        expected = made[f"model.layers.{layer}.up.weight"].astype(target)
        np.testing.assert_array_equal(block["mlp"]["up"]["kernel"], expected)
        np.testing.assert_array_equal(block["norm"]["scale"], made[f"model.layers.{layer}.norm.weight"].astype(target))


class Mapped:
    """One tensor that is a view of a file and aligned so well that JAX could take it as it is."""

    def __init__(self, path: Path):
        self._array = np.memmap(path, np.float32, "r", shape=(1, 64, 64))

    def shapes(self):
        return {"w": (64, 64)}

    def read(self, name, dtype):
        return self._array[0].astype(dtype, copy=False)


@pytest.mark.parametrize("lead", [(), (1,)])
def test_parameters_do_not_alias_the_file(tmp_path, lead):
    (tmp_path / "w").write_bytes(np.ones((64, 64), np.float32).tobytes())
    struct = jax.ShapeDtypeStruct((*lead, 64, 64), jnp.float32)
    names = TensorNames(top={}, block={"w": "w"})
    described = {"blocks": {"w": struct} if lead else {"layer_0": {"w": struct}}}
    params = load_params(Checkpoint("here", {}, Mapped(tmp_path / "w")), names, described)
    with (tmp_path / "w").open("r+b") as file:
        file.write(bytes(64 * 64 * 4))
    assert jax.tree.all(jax.tree.map(lambda leaf: bool((np.asarray(leaf) == 1).all()), params))


def test_progress_counts_the_bytes_of_the_parameters(tmp_path):
    checkpoint = open_hf_folder(write_folder(tmp_path, tensors()))
    calls: list[tuple[int, int]] = []
    load_params(checkpoint, NAMES, abstract(jnp.bfloat16), progress=lambda done, total: calls.append((done, total)))
    total = 2 * (5 * 4 + 3 * (6 * 4 + 4))
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert {stated for _, stated in calls} == {total}


def test_a_missing_tensor_is_named_before_any_is_read():
    made = tensors()
    del made["model.layers.1.up.weight"]
    with pytest.raises(InvalidCheckpoint, match=r"here: missing tensor model\.layers\.1\.up\.weight;"):
        load_params(unread(made), NAMES, abstract(jnp.float32))


def test_many_missing_tensors_are_counted():
    with pytest.raises(InvalidCheckpoint, match=r"missing tensors .*, .*, .* and 4 more"):
        load_params(unread({}), NAMES, abstract(jnp.float32))


@pytest.mark.parametrize("stacked", [True, False])
def test_an_extra_tensor_is_named_before_any_is_read(stacked):
    made = tensors(num_layers=4) | {"model.layers.0.inv_freq": np.ones(2)}
    with pytest.raises(InvalidCheckpoint, match=r"no place for tensors model\.layers\.3\.norm") as error:
        load_params(unread(made), NAMES, abstract(jnp.float32, stacked=stacked))
    assert "inv_freq" not in str(error.value)


def test_an_ignored_name_must_match_as_a_whole():
    made = tensors() | {"model.layers.0.inv_freq.more": np.ones(2)}
    with pytest.raises(InvalidCheckpoint, match=r"inv_freq\.more"):
        load_params(unread(made), NAMES, abstract(jnp.float32))


@pytest.mark.parametrize("stacked", [True, False])
def test_a_wrong_shape_is_named_with_both_shapes(stacked):
    made = tensors() | {"model.layers.2.up.weight": np.ones((4, 6), np.float32)}
    named = r"model\.layers\.2\.up\.weight has shape \[4, 6\], but its configuration makes it \[6, 4\]"
    with pytest.raises(InvalidCheckpoint, match=named):
        load_params(unread(made), NAMES, abstract(jnp.float32, stacked=stacked))


WATCH = """
import sys, threading, time
from pathlib import Path
import jax, jax.numpy as jnp
from jaxinfer.checkpoint.hf_folder import open_hf_folder
from jaxinfer.checkpoint.load import load_params
from jaxinfer.models.families.family import TensorNames

def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def watch():
    while not done.is_set():
        peak[0] = max(peak[0], anonymous_bytes())
        time.sleep(0.002)

dtype, stacked = jnp.dtype(sys.argv[2]), sys.argv[3] == "stacked"
embed = jax.ShapeDtypeStruct((8192, 2048), dtype)
up = lambda *lead: {"up": {"kernel": jax.ShapeDtypeStruct((*lead, 2048, 2048), dtype)}}
abstract = {"embed": {"embedding": embed}, "blocks": up(12) if stacked else {f"layer_{i}": up() for i in range(12)}}
names = TensorNames({"embed.embedding": "embed"}, {"up.kernel": "up.{layer}"})
checkpoint = open_hf_folder(Path(sys.argv[1]))
done, peak = threading.Event(), [0]
thread = threading.Thread(target=watch)
thread.start()
params = load_params(checkpoint, names, abstract)
done.set()
thread.join()
print(peak[0], sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory):
    rng = np.random.default_rng(0)
    made = {f"up.{layer}": rng.random((2048, 2048), np.float32) for layer in range(12)}
    made = {name: array.astype(ml_dtypes.bfloat16) for name, array in made.items()}
    made["embed"] = np.ones((8192, 2048), ml_dtypes.bfloat16)
    return write_folder(tmp_path_factory.mktemp("large"), made, num_shards=2)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="anonymous memory is read from Linux's /proc")
@pytest.mark.parametrize(("target", "layout"), [("float32", "stacked"), ("float32", "split"), ("bfloat16", "stacked")])
def test_peak_anonymous_memory_is_bounded(large_folder, target, layout):
    child = subprocess.run(
        [sys.executable, "-c", WATCH, str(large_folder), target, layout],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    peak, num_bytes = map(int, child.stdout.split())
    assert num_bytes == 16 * 2048 * 2048 * jnp.dtype(target).itemsize
    assert peak <= 1.5 * num_bytes + 400e6
    # The allowance for the interpreter and JAX must not hide a second copy of the parameters.
    assert peak <= 1.25 * num_bytes + 150e6
