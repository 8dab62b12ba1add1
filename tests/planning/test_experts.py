"""What a plan counts of experts: those that a step's tokens go to, and the step compiled for a TPU."""

import dataclasses

import pytest

from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import Experts, shallower
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.token_exchange import choose_exchange
from jaxinfer.parallel.mesh import MeshConfig
from jaxinfer.planning.compile import compile_programs
from jaxinfer.planning.deployment import Deployment
from jaxinfer.planning.footprint import count_footprint, decode_floor, estimate_prefill, estimate_step
from jaxinfer.planning.hlo.walk import total
from jaxinfer.planning.known_models import planned_config

MIXTRAL = dataclasses.replace(planned_config("mixtral-8x7b"), num_layers=2)
# Its layers are scanned in pairs, with a window and without, so that all compile as fast as few.
GPT_OSS = planned_config("gpt-oss-20b")
STACK = 3 * 4096 * 14336  # the weights of one expert of one layer


def deployment(batch: int = 1) -> Deployment:
    return Deployment(MIXTRAL, "v5e:2x4", MeshConfig(expert=8), batch=batch, max_len=1024, prompt_tokens=256)


def test_the_share_of_experts_grows_with_the_tokens():
    experts = Experts(8, 2, 1)
    assert experts.share_read(1) == pytest.approx(2 / 8)
    assert experts.share_read(2) == pytest.approx(1 - (6 / 8) ** 2)
    assert experts.share_read(64) > 0.999


def test_a_step_reads_the_experts_that_its_tokens_go_to_and_multiplies_two():
    found = count_footprint(deployment())
    # One of eight experts of each layer is on a device, in bfloat16.
    assert found.expert_bytes == 2 * STACK * 2
    assert found.unread_bytes(1) == round(found.expert_bytes * 6 / 8)
    assert decode_floor(found) == found.read_bytes - found.unread_bytes(1) + found.cache_bytes
    assert decode_floor(found, 64) - decode_floor(found) == pytest.approx(found.expert_bytes * 6 / 8, rel=1e-6)
    router = 2 * 8 * 4096
    attention = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 4096)
    assert found.block_weights == pytest.approx(2 * STACK * 2 / 8 + router + attention, rel=1e-6)
    # Six rows do not divide: all devices have all of them.
    many = deployment(6)
    found = count_footprint(many)
    work = estimate_step(many, found)
    assert work.hbm_bytes == decode_floor(found, 6)
    assert work.collectives == {"all-reduce": (2, 2 * 6 * 4096 * 4)}


def test_rows_that_fill_a_batch_up_are_counted():
    found, full = (count_footprint(deployment(batch)) for batch in (17, 24))
    assert found == full
    assert estimate_step(deployment(17), found) == estimate_step(deployment(24), full)
    assert estimate_prefill(deployment(17), found) == estimate_prefill(deployment(24), full)


def test_sums_in_bytes_are_two_exchanges_of_codes_and_scales():
    asked = dataclasses.replace(deployment(64), collectives="int8")
    step = estimate_step(asked, count_footprint(asked))
    gathered, parts = 64 * (4096 * 2 + 2 * 8), 64 * (4096 + 4096 // 128 * 4)
    assert step.collectives == {"all-gather": (4, 2 * gathered), "all-to-all": (4, 2 * parts)}
    assert step.sent_bytes == 2 * (gathered * 7 // 8 + parts * 7 // 8)


@pytest.mark.parametrize(("width", "form"), [(4096, "gather"), (4096 + 128, "all_to_all")])
def test_sums_that_are_not_sent_in_bytes_are_not_counted_so(width, form):
    """With four copies of a token on eight devices bytes are fewer; but blocks of 128 must divide."""
    backend = choose_backend("bfloat16", "tpu", collectives="int8")
    assert choose_exchange(256, 4, width, 8, backend) == form


def test_devices_that_split_the_rows_hold_their_cache_and_exchange_tokens():
    """A step gathers 64 tokens; a prompt's are many, and two of eight devices get each."""
    one, many = (count_footprint(deployment(batch)) for batch in (1, 64))
    assert many.cache_bytes == 8 * one.cache_bytes
    asked = deployment(64)
    step, prompt = estimate_step(asked, many), estimate_prefill(asked, many)
    assert step.hbm_bytes == decode_floor(many, 64)
    gathered, sums = 64 * (4096 * 2 + 2 * 8), 8 * 4096 * 4
    assert step.collectives == {"all-gather": (4, 2 * gathered), "reduce-scatter": (2, 2 * sums)}
    assert step.sent_bytes == 2 * (gathered * 7 // 8 + sums * 7)
    rows = 8 * 256 * 2 * 4096 * (2 + 4)
    assert prompt.collectives == {"all-gather": (2, 2 * 8 * 8 * 4), "ragged-all-to-all": (4, 2 * rows)}
    # Its experts multiply the tokens of all devices, its attention an eighth.
    alone = dataclasses.replace(asked, mesh=MeshConfig(), topology="v5e:1x1")
    assert prompt.flops == pytest.approx(estimate_prefill(alone, count_footprint(alone)).flops / 8, rel=1e-6)


def test_experts_that_do_not_split_are_refused():
    with pytest.raises(InvalidOption, match="8 experts do not split over expert=3 devices"):
        Deployment(MIXTRAL, "v5e:1x3", MeshConfig(expert=3), batch=1, max_len=64, prompt_tokens=8)
    with pytest.raises(InvalidOption, match="has no experts: leave expert=4 out"):
        Deployment(planned_config("llama-2-7b"), "v5e:2x2", MeshConfig(expert=4), batch=1, max_len=64, prompt_tokens=8)
    asked = {"batch": 1, "max_len": 64, "prompt_tokens": 8, "weights": "int8:only=experts"}
    with pytest.raises(InvalidOption, match="weights 'int8:only=experts': the model has no experts: leave only= out"):
        Deployment(planned_config("llama-2-7b", 1), "v5e:1x1", MeshConfig(), **asked)
    with pytest.raises(InvalidOption, match="activations 'int8': experts multiply rows as they are"):
        dataclasses.replace(deployment(), weights="int8", activations="int8")


@pytest.mark.parametrize(
    ("weights", "bits"),
    [
        ("mxfp4:only=experts", 4.25),
        *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in (("int4", 4.5), ("int8", 8))),
    ],
)
def test_experts_in_few_bits_are_counted_in_their_bits(weights, bits):
    found = count_footprint(dataclasses.replace(deployment(), weights=weights))
    # A scale of int8 for each row.
    scales = 2 * 4 * (2 * 14336 + 4096) if weights == "int8" else 0
    assert found.expert_bytes == 2 * STACK * bits / 8 + scales
    assert found.unread_bytes(1) == round(found.expert_bytes * 6 / 8)
    if "only" in weights:  # what else there is stays in bfloat16
        attention = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 4096)
        assert found.block_bytes - found.expert_bytes == pytest.approx(2 * attention, rel=0.01)


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    "weights",
    [
        pytest.param(each, marks=pytest.mark.exhaustive)
        for each in ("int4:group=64", "int8", "fp8:group=128", "nf4:group=64")
    ],
)
def test_an_experts_codes_are_read_where_they_lie(weights):
    """By our kernel, which is told where the expert is, and says what it is expected to read."""
    options = {"batch": 1, "max_len": 1024, "mesh": MeshConfig(expert=8), "prompt_tokens": None, "weights": weights}
    program = compile_programs(MIXTRAL, "v5e:2x4", **options)["decode"]
    found = count_footprint(dataclasses.replace(deployment(), weights=weights))
    counted = total(program.instructions())
    assert counted.hbm_bytes == pytest.approx(decode_floor(found), rel=0.05)
    assert program.temporary_bytes < found.expert_bytes / 20
    kernels = [each for each in program.instructions() if each.name.startswith("grouped_matmul")]
    assert [each.runs for each in kernels] == [2, 2]


@pytest.mark.exhaustive
@pytest.mark.tpu_compile
def test_gpt_oss_in_its_own_bits_fits_one_v5e_and_widens_no_expert_in_memory():
    options = {"batch": 1, "max_len": 8192, "prompt_tokens": None, "weights": "mxfp4:only=experts"}
    program = compile_programs(GPT_OSS, "v5e:1x1", **options)["decode"]
    assert program.total_bytes < 14 * 2**30
    kernels = [each for each in program.instructions() if each.name.startswith("grouped_matmul")]
    assert [each.runs for each in kernels] == [12] * 4
    # A row goes to 4 experts, of gate and up two matrices each.
    assert max(each.read_bytes + each.written_bytes for each in kernels) < 8.1 * 2880 * 2880 * 4.25 / 8
    assert program.temporary_bytes < 2880 * 2880 * 2


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(MeshConfig(expert=8), marks=pytest.mark.slow),
        pytest.param(MeshConfig(expert=2, tensor=4), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_a_step_reads_experts_where_they_lie_and_adds_up_once_a_layer_and_axis(mesh):
    """A copy of the experts of one layer would be a hundred times as large as all temporaries."""
    # Of few tokens: sampling is compiled sooner.
    config = dataclasses.replace(MIXTRAL, vocab_size=1024)
    asked = Deployment(config, "v5e:2x4", mesh, batch=1, max_len=1024, prompt_tokens=256)
    options = {"batch": 1, "max_len": 1024, "mesh": mesh, "prompt_tokens": None}
    program = compile_programs(config, "v5e:2x4", **options)["decode"]
    assert program.temporary_bytes < 3 * STACK * 2 / 100
    counted = total(program.instructions())
    floor = decode_floor(count_footprint(asked))
    assert floor < counted.hbm_bytes < 1.1 * floor
    # Each product of a layer is one kernel, which says what it reads of its experts.
    kernels = [each for each in program.instructions() if each.name.startswith("grouped_matmul")]
    assert [each.runs for each in kernels] == [2, 2]
    assert set(counted.collectives) == {"all-reduce"}


@pytest.mark.exhaustive
@pytest.mark.tpu_compile
def test_the_compiler_makes_of_an_exchange_what_was_asked_for():
    """Of a step's 16 tokens a gather, one of what they chose, and a reduce-scatter, though a device has but two."""
    options = {"batch": 16, "max_len": 1024, "mesh": MeshConfig(expert=8)}
    program = compile_programs(MIXTRAL, "v5e:2x4", prompt_tokens=None, **options)["decode"]
    found = total(program.instructions()).collectives
    asked = Deployment(MIXTRAL, "v5e:2x4", prompt_tokens=256, **options)
    estimated = estimate_step(asked, count_footprint(asked)).collectives
    assert {kind: found[kind] for kind in estimated} == estimated


@pytest.mark.exhaustive
@pytest.mark.tpu_compile
def test_rows_of_mixtral_are_split_over_the_devices_of_its_experts():
    """All layers on 16 chips: the cache of two rows, and of many tokens no more is sent than goes to experts."""
    config, mesh = planned_config("mixtral-8x7b"), MeshConfig(expert=8, tensor=2)
    options = {"batch": 16, "max_len": 4096, "mesh": mesh, "prompt_tokens": 256}
    programs = compile_programs(config, "v5e:4x4", **options)
    asked = Deployment(config, "v5e:4x4", **options)
    found = count_footprint(asked)
    slots = found.cache_bytes / (32 * 2 * 2 * 512 * 2)  # layers, rows, keys and values, lanes of a device
    assert 4096 <= slots <= 4096 + 128
    assert programs["decode"].total_bytes < 7.5 * 2**30
    floor, counted = decode_floor(found, 16), total(programs["decode"].instructions())
    assert floor < counted.hbm_bytes < 1.1 * floor
    prefill, estimated = total(programs["prefill"].instructions()), estimate_prefill(asked, found)
    assert prefill.collectives["ragged-all-to-all"] == estimated.collectives["ragged-all-to-all"]


@pytest.mark.exhaustive
@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("model", "topology", "mesh", "weights", "batch", "gigabytes"),
    [
        ("qwen3-30b-a3b", "v5e:2x4", MeshConfig(expert=2, tensor=4), None, 16, 10),
        ("qwen3-30b-a3b", "v5e:2x4", MeshConfig(expert=8), None, 16, 11),
        ("qwen3-30b-a3b", "v5e:2x4", MeshConfig(expert=8), "int4", 1, 4),
        ("qwen3-30b-a3b", "v5e:2x4", MeshConfig(expert=8), "int4", 16, 10),
        # Rings stay in the memory of the chip, and kernels whose heads are no whole tiles are not copied.
        ("gpt-oss-20b", "v5e:2x4", MeshConfig(expert=8), "mxfp4:only=experts", 16, 7),
        ("gpt-oss-20b", "v5e:2x4", MeshConfig(expert=8), None, 16, 10),
        # Blocks of experts that get one row each hold little more than that.
        ("deepseek-v3", "v5p:4x4x2", MeshConfig(expert=4, tensor=8), None, 32, 47),
        # As it is published, on the smallest slices that hold it.
        ("deepseek-v3", "v5p:2x2x2", MeshConfig(expert=2, tensor=4), "fp8:group=128", 8, 86),
        ("deepseek-v3", "tpu7x:2x2x1", MeshConfig(expert=2, tensor=4), "fp8:group=128", 8, 86),
        ("qwen3-30b-a3b", "v5e:2x4", MeshConfig(expert=8), "fp8:group=128", 16, 6),
        ("qwen3-30b-a3b", "v5e:2x4", MeshConfig(expert=8), "nf4:group=64", 16, 4),
    ],
)
def test_a_model_fits_and_a_step_moves_its_active_weights_and_its_cache(
    model, topology, mesh, weights, batch, gigabytes
):
    """All layers, texts of 4,096 tokens; within a tenth."""
    options = {"batch": batch, "max_len": 4096, "weights": weights}
    asked = Deployment(planned_config(model), topology, mesh, prompt_tokens=256, **options)
    program = compile_programs(asked.config, topology, mesh=mesh, prompt_tokens=None, **options)["decode"]
    floor = decode_floor(count_footprint(asked), batch)
    assert program.total_bytes < gigabytes << 30
    assert floor < total(program.instructions()).hbm_bytes < 1.1 * floor


@pytest.mark.exhaustive
@pytest.mark.tpu_compile
def test_latent_rows_are_read_once_as_keys_and_values():
    """Five layers of DeepSeek-V3, of which three have no experts."""
    config, mesh = shallower(planned_config("deepseek-v3"), 5), MeshConfig(expert=4, tensor=8)
    asked = Deployment(config, "v5p:4x4x2", mesh, batch=32, max_len=4096, prompt_tokens=256)
    options = {"batch": 32, "max_len": 4096, "mesh": mesh, "prompt_tokens": None}
    program = compile_programs(config, "v5p:4x4x2", **options)["decode"]
    floor = decode_floor(count_footprint(asked), 32)
    assert floor < total(program.instructions()).hbm_bytes < 1.1 * floor


@pytest.mark.exhaustive
def test_a_step_of_gpt_oss_reads_the_experts_of_its_tokens_and_the_cache_once():
    """Bytes within a tenth of the floor: biases, sinks and windows add nothing to it, and kernels read the cache."""
    asked = Deployment(GPT_OSS, "v5e:2x4", MeshConfig(expert=8), batch=1, max_len=8192, prompt_tokens=256)
    found = count_footprint(asked)
    compiled = {"batch": 1, "max_len": 8192, "mesh": asked.mesh, "prompt_tokens": None}
    program = compile_programs(GPT_OSS, "v5e:2x4", **compiled)["decode"]
    assert "attend_cache" in program.hlo
    stack = found.expert_bytes // (4 * 24)  # of one of a device's four experts of a layer
    assert program.temporary_bytes < stack / 4
    counted = total(program.instructions())
    floor = decode_floor(found)
    assert floor < counted.hbm_bytes < 1.1 * floor
    assert set(counted.collectives) == {"all-reduce"}
