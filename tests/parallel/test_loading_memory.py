"""A process that loads a model onto a mesh holds its own shards, and little beside them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.default_model import default_model_path
from tests.parallel.devices import several

WATCH = """
import sys, threading, time
from pathlib import Path
import jax, jaxinfer.language_model

def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def watch():
    while not done.is_set():
        peak[0] = max(peak[0], anonymous_bytes())
        time.sleep(0.002)

jax.devices()
before, done, peak = anonymous_bytes(), threading.Event(), [0]
thread = threading.Thread(target=watch)
thread.start()
lm = jaxinfer.load(sys.argv[1], dtype="float32", mesh=sys.argv[2])
done.set()
thread.join()
leaves = jax.tree.leaves(lm.params)
own = {(id(leaf), str(shard.index)): shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards}
print(peak[0] - before, sum(own.values()), max(leaf.nbytes for leaf in leaves))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="anonymous memory is read from Linux's /proc")
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param("data=2,tensor=4", marks=pytest.mark.slow),
        *(pytest.param(mesh, marks=pytest.mark.exhaustive) for mesh in ("tensor=8", "pipeline=2,tensor=4")),
    ],
)
def test_a_load_holds_its_shards_and_one_and_a_half_tensors(mesh):
    child = subprocess.run(
        [sys.executable, "-c", WATCH, str(default_model_path()), mesh],
        env={**os.environ, **several(8)}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    peak, own, largest = map(int, child.stdout.split())
    assert own > 500e6
    # Devices of the data axis have the same shards, which this machine's memory holds once; and the tokenizer's 50 MB.
    assert peak <= own + 1.5 * largest + 50e6
