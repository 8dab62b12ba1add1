"""A step moves what its target and its drafter have to be read for, and at most a tenth more, on TPUs as compiled."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

from jaxinfer.decoding.registry import parse_strategy
from jaxinfer.decoding.strategies.draft_model import DraftModel
from jaxinfer.decoding.strategies.eagle import Eagle
from jaxinfer.decoding.strategies.mtp import Mtp
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.models.config import DecoderConfig
from jaxinfer.parallel.mesh import MeshConfig
from jaxinfer.planning.compile import split_decoder
from jaxinfer.planning.deployment import Deployment
from jaxinfer.planning.footprint import count_footprint
from jaxinfer.planning.hlo.walk import total
from jaxinfer.planning.known_models import planned_config
from jaxinfer.planning.placement import device_bytes, placed_drafter_params, placed_params
from jaxinfer.planning.report import drafting_trips
from jaxinfer.planning.strategies import planned_strategy
from tests.planning.buffers import largest_buffers
from tests.planning.models import LLAMA_2_7B, LLAMA_3_8B, LLAMA_68M

SLOTS = 2048
ONE, FOUR = ("v5e:1x1", MeshConfig()), ("v5e:2x2", MeshConfig(tensor=4))


def cache_bytes(config: DecoderConfig, mesh: MeshConfig, slots: int) -> int:
    """Return the bytes of a text's keys and values on each device."""
    heads = -(-config.num_kv_heads // mesh.tensor) * config.head_dim
    return 2 * config.num_layers * slots * max(heads, 128) * 2


def read_by_a_pass(strategy: Strategy, config: DecoderConfig, mesh: MeshConfig, slots: int) -> int:
    """Count what a pass of a drafter reads on each device: its weights but for tables that are looked up, its cache."""
    params: Any = placed_drafter_params(strategy, mesh.abstract)
    head = device_bytes({"head": placed_params(*split_decoder(config, mesh, "bfloat16"), mesh.abstract)["head"]})
    if isinstance(strategy, DraftModel):
        assert strategy.config is not None
        looked_up = 0 if strategy.config.tied_embeddings else device_bytes(params["embed"])
        return device_bytes(params) - looked_up + cache_bytes(strategy.config, mesh, slots)
    if isinstance(strategy, Mtp):
        return device_bytes(params) + head + cache_bytes(replace(config, num_layers=1), mesh, slots)
    if isinstance(strategy, Eagle):
        # Its layer is whole on every device.
        return device_bytes(params) + cache_bytes(replace(config, num_layers=1), MeshConfig(), slots)
    return device_bytes(params) + head + cache_bytes(replace(config, num_layers=5), mesh, slots)


# A drafter, and how often a step runs it.
CASES = [
    ("mtp:num_draft_tokens=3", LLAMA_2_7B, ONE, 3),
    ("mtp:num_draft_tokens=3", LLAMA_3_8B, FOUR, 3),
    ("eagle:tree=dynamic:16,depth=5", LLAMA_2_7B, ONE, 5),
    ("eagle:tree=dynamic:16,depth=5", LLAMA_3_8B, FOUR, 5),
    ("dflash", LLAMA_3_8B, FOUR, 1),
    ("draft_model:model=68m,num_draft_tokens=4", LLAMA_2_7B, ONE, 4),
    ("draft_model:model=68m,tree=3.2.1", LLAMA_2_7B, ONE, 3),
    ("draft_model:model=68m,tree=dynamic:16", LLAMA_2_7B, ONE, 5),
    ("draft_model:model=llama-3.2-1b,tree=3.2.1", LLAMA_3_8B, FOUR, 3),
]


@pytest.fixture(autouse=True)
def small_model(monkeypatch):
    """A draft model that plans know no name of."""

    def known(model: str, layers: int | None = None) -> DecoderConfig:
        return LLAMA_68M if model == "68m" else planned_config(model, layers)

    monkeypatch.setattr("jaxinfer.planning.strategies.planned_config", known)


@pytest.mark.tpu_compile
@pytest.mark.exhaustive
@pytest.mark.parametrize(("spec", "config", "where", "passes"), CASES, ids=[f"{c[0]}-{c[2][0]}" for c in CASES])
def test_a_step_reads_target_and_drafter_and_little_else(spec, config, where, passes):
    topology, mesh = where
    asked = Deployment(config, topology, mesh, batch=1, max_len=SLOTS, prompt_tokens=16, strategy_spec=spec)
    program = asked.compile(asked.strategy)["decode"]
    footprint = count_footprint(asked)
    drafter = read_by_a_pass(asked.strategy, config, mesh, asked.num_slots)
    target = footprint.read_bytes + footprint.cache_bytes
    moved = total(program.instructions(inner_trips=drafting_trips(asked.strategy))).hbm_bytes
    print(f"{spec} {topology}: {moved / 1e9:.2f} GB, {target / 1e9:.2f} + {passes} x {drafter / 1e9:.3f} GB")
    assert target < moved < 1.1 * (target + passes * drafter)
    assert program.alias_bytes >= program.cache_bytes, largest_buffers(program.hlo)
    # Beside what is fetched ahead into vector memory, of which there are 128 MiB.
    assert program.temporary_bytes < 0.1 * program.cache_bytes + 2**27, largest_buffers(program.hlo)


def test_the_first_pass_of_a_chain_stands_before_the_loop():
    small = DraftModel(num_draft_tokens=4, config=LLAMA_68M)
    assert [drafting_trips(each) for each in (small, Mtp(num_draft_tokens=3))] == [3, 2]
    assert drafting_trips(parse_strategy("jacobi:num_draft_tokens=5")) == 5
    assert drafting_trips(parse_strategy("draft_model:num_draft_tokens=7+prompt_lookup:num_draft_tokens=4")) == 6


def test_blocks_of_drafters_are_planned_split_as_they_run():
    """Those of an MTP layer and of DFlash; their projections stand on every device."""
    parts, config = {}, replace(LLAMA_3_8B, num_layers=2)
    for count in (1, 4):
        mesh = MeshConfig(tensor=count)
        described = placed_drafter_params(planned_strategy("mtp", config, mesh, "bfloat16"), mesh.abstract)
        parts[count] = {name: device_bytes(described[name]) for name in ("block", "project")}
    norms = 2 * config.model_dim * jnp.dtype(jnp.bfloat16).itemsize
    assert parts[4]["project"] == parts[1]["project"]
    assert 4 * (parts[4]["block"] - norms) == parts[1]["block"] - norms
    one, four = (MeshConfig(tensor=count) for count in (1, 4))
    held = [
        device_bytes(
            placed_drafter_params(planned_strategy("dflash", config, mesh, "bfloat16"), mesh.abstract)["decoder"]
        )
        for mesh in (one, four)
    ]
    assert 3.9 < held[0] / held[1] < 4
