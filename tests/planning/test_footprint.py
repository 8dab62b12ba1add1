"""What a deployment holds and does at least, counted by hand: two layers on two by two devices."""

import dataclasses

import pytest

from jaxinfer.models.config import Alibi, DecoderConfig, LayerKind, Rope
from jaxinfer.parallel.mesh import MeshConfig
from jaxinfer.planning.deployment import Deployment
from jaxinfer.planning.footprint import count_footprint, decode_floor, estimate_prefill, estimate_step, prefill_floor
from jaxinfer.planning.roofline import Work, peak_flops, roofline
from pallas_kernels.chips import CHIPS

CONFIG = DecoderConfig(
    family="llama",
    vocab_size=1024,
    num_layers=2,
    model_dim=256,
    ffn_dim=512,
    num_heads=4,
    num_kv_heads=2,
    head_dim=128,
    max_position=4096,
    norm_eps=1e-5,
    layer_pattern=(LayerKind(Rope(1e4, 128)),),
)
DEPLOYMENT = Deployment(CONFIG, "v5e:2x2", MeshConfig(data=2, tensor=2), batch=4, max_len=1000, prompt_tokens=16)
SLOTS = DEPLOYMENT.num_slots
# Numbers of a device: half of query and output, key and value, gate, up and down, and both norms; half of a table.
LAYER = (2 * 256 * 512 + 2 * 256 * 256 + 3 * 256 * 512) // 2 + 2 * 256
TABLE = 1024 * 256 // 2
CACHE = 2 * 2 * 2 * SLOTS * 128 * 2  # keys and values, layers, rows, slots, one head's lanes, bytes


@pytest.mark.slow
def test_a_device_holds_its_heads_of_its_rows_and_reads_all_but_the_embedding():
    found = count_footprint(DEPLOYMENT)
    assert found.cache_bytes == CACHE
    assert found.block_bytes == 2 * 2 * LAYER
    assert found.weights_bytes == 2 * (2 * LAYER + 2 * TABLE + 256)
    assert found.read_bytes == found.weights_bytes - 2 * TABLE
    assert found.multiplied_weights == 2 * LAYER + TABLE
    assert decode_floor(found) == found.read_bytes + CACHE
    assert prefill_floor(DEPLOYMENT, found) == found.read_bytes + CACHE * 16 // SLOTS
    assert found.total_bytes == found.weights_bytes + CACHE + found.state_bytes
    tied = dataclasses.replace(DEPLOYMENT, config=dataclasses.replace(CONFIG, tied_embeddings=True))
    assert count_footprint(tied).read_bytes == count_footprint(tied).weights_bytes == 2 * (2 * LAYER + TABLE + 256)


def test_a_step_multiplies_its_nodes_and_sums_twice_a_layer_and_once_more():
    footprint = count_footprint(DEPLOYMENT)
    for nodes in (1, 3):
        work = estimate_step(DEPLOYMENT, footprint, nodes)
        rows, attention = 2 * nodes, 4 * 4 * 128 * 2 * SLOTS // 2
        assert work.flops == rows * (2 * 2 * LAYER + attention) + rows * 2 * TABLE
        assert work.hbm_bytes == decode_floor(footprint)
        hidden = rows * 256 * 2
        assert work.collectives == {"all-reduce": (5, 5 * hidden)}
        assert work.sent_bytes == 2 * 5 * hidden // 2
        # Two neighbours: a link there, a link back.
        assert work.hops == 5 * 2


def test_prefill_attends_to_half_of_what_it_writes_and_draws_once_a_row():
    work = estimate_prefill(DEPLOYMENT, count_footprint(DEPLOYMENT))
    assert work.flops == 2 * 16 * (2 * 2 * LAYER + 4 * 4 * 128 * 16 // 2) + 2 * 2 * TABLE
    assert work.hbm_bytes == prefill_floor(DEPLOYMENT, count_footprint(DEPLOYMENT))
    assert work.sent_bytes == 2 * 5 * (2 * 16 * 256 * 2) // 2


def test_a_window_bounds_what_its_layers_attend_to():
    pattern = (LayerKind(Rope(1e4, 128)), LayerKind(Rope(1e4, 128), window=64))
    narrow = dataclasses.replace(DEPLOYMENT, config=dataclasses.replace(CONFIG, layer_pattern=pattern))
    wide, found = (estimate_step(each, count_footprint(each)).flops for each in (DEPLOYMENT, narrow))
    assert wide - found == 2 * 4 * 4 * 128 * (SLOTS - 64) // 2


def test_lanes_that_hold_positions_are_multiplied_too():
    """A head of 128 with ALiBi is 144 lanes wide."""
    heads = dataclasses.replace(DEPLOYMENT, config=dataclasses.replace(CONFIG, num_kv_heads=4))
    lanes = dataclasses.replace(heads, config=dataclasses.replace(heads.config, alibi=Alibi((0.5,) * 4)))
    plain, wide = (estimate_step(each, count_footprint(each)).flops for each in (heads, lanes))
    assert wide - plain == 2 * 4 * 4 * 16 * 2 * SLOTS // 2


def test_a_step_is_bound_by_what_takes_longest():
    chip = CHIPS["v5e"]
    second = {
        "HBM": Work(int(chip.device_hbm_bytes_per_second), 0, 0, {}),
        "MXU": Work(0, int(chip.device_bf16_peak), 0, {}),
        "ICI": Work(0, 0, int(chip.device_ici_bytes_per_second), {}),
    }
    for bound, work in second.items():
        found = roofline(work, chip, "bfloat16")
        assert (found.bound, found.seconds) == (bound, pytest.approx(1))
    together = Work(second["HBM"].hbm_bytes, second["MXU"].flops // 2, second["ICI"].sent_bytes // 2, {})
    assert roofline(together, chip, "bfloat16").seconds == pytest.approx(1)
    assert peak_flops(chip, "float32") == peak_flops(chip, "bfloat16") / 6
    # What collectives wait for comes on top of what hides the rest.
    waiting = dataclasses.replace(second["HBM"], hops=round(2 / chip.ici_hop_seconds))
    assert roofline(waiting, chip, "bfloat16").seconds == pytest.approx(3)
    assert roofline(waiting, chip, "bfloat16").bound == "latency"
    both = roofline(second["HBM"], chip, "bfloat16"), roofline(second["MXU"], chip, "float32")
    assert [each.seconds for each in both] == [pytest.approx(1), pytest.approx(6)]
