"""A TPU's decoding step reads live blocks where they lie, and a plan counts the bytes of those that are live."""

from dataclasses import replace

import pytest

from jaxinfer.errors import InvalidOption
from jaxinfer.ops.sparsity import Sparsity
from jaxinfer.parallel.mesh import parse_mesh
from jaxinfer.planning.compile import compile_programs
from jaxinfer.planning.deployment import Deployment
from jaxinfer.planning.footprint import count_footprint, decode_floor, estimate_step
from jaxinfer.planning.hlo.walk import total
from jaxinfer.planning.known_models import planned_config

CONFIG = replace(planned_config("llama-2-7b", 2), activation="relu", vocab_size=512)
SMALL = replace(CONFIG, num_layers=1, model_dim=1024, ffn_dim=2048, num_heads=8, num_kv_heads=8)


def decode(topology: str, mesh: str):
    given = {"batch": 8, "max_len": 128, "mesh": parse_mesh(mesh), "prompt_tokens": None}
    return compile_programs(CONFIG, topology, **given, sparsity=Sparsity("exact"))["decode"]


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("topology", "mesh"),
    [
        pytest.param("v5e:1x1", "tensor=1", marks=pytest.mark.exhaustive),
        # Of 1,376 hidden units of a device the last block is cut.
        pytest.param("v5e:2x4", "tensor=8", marks=pytest.mark.slow),
        pytest.param("v5e:2x4", "pipeline=2,tensor=4", marks=pytest.mark.exhaustive),
    ],
)
def test_no_weights_are_copied_on_the_way_to_the_kernel(topology, mesh):
    program = decode(topology, mesh)
    kernel_bytes = CONFIG.model_dim * CONFIG.ffn_dim * 2 // parse_mesh(mesh).tensor
    instructions = program.instructions()
    # The kernels of one layer, in the loop over layers, by the estimates of all blocks live.
    kernels = [each for each in instructions if each.name.startswith("sparse_ffn")]
    assert len(kernels) == 2
    assert program.block_products() == kernels
    assert all(kernel_bytes < each.read_bytes < 1.05 * kernel_bytes for each in kernels)
    # A copy would be written.
    assert total(instructions).written_bytes < 0.2 * kernel_bytes


def planned(mesh: str = "tensor=1", **options) -> Deployment:
    topology = "v5e:1x1" if mesh == "tensor=1" else "v5e:2x4"
    return Deployment(SMALL, topology, parse_mesh(mesh), batch=8, max_len=128, prompt_tokens=16, **options)


@pytest.mark.parametrize(
    ("mesh", "is_gated"),
    [("tensor=1", True), ("tensor=1", False), pytest.param("tensor=8", True, marks=pytest.mark.exhaustive)],
)
def test_a_step_reads_the_live_share_of_up_and_down_or_of_down_alone(mesh, is_gated):
    """Without a gate all of up says which features are active."""

    def asked(**options) -> Deployment:
        return replace(planned(mesh, **options), config=replace(SMALL, gated_mlp=is_gated))

    everything, some = asked(sparsity="threshold:0.1"), asked(sparsity="threshold:0.1", live_share=0.25)
    weights = SMALL.num_layers * (2 if is_gated else 1) * SMALL.model_dim * SMALL.ffn_dim // some.mesh.tensor
    whole, part = count_footprint(everything), count_footprint(some)
    assert whole == count_footprint(asked())
    assert part.weights_bytes == whole.weights_bytes
    assert decode_floor(whole) - decode_floor(part) == 0.75 * weights * 2
    dense, sparse = estimate_step(everything, whole), estimate_step(some, part)
    assert dense.hbm_bytes - sparse.hbm_bytes == 0.75 * weights * 2
    assert dense.flops - sparse.flops == 8 * 2 * 0.75 * weights


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "bits"), [("2:4", 9), ("blocks:kept=1/2", 8.25)])
def test_sparse_weights_are_counted_as_they_are_stored_and_multiplied_whole(weights, bits):
    dense, sparse = (planned(weights=each) for each in (None, weights))
    plain, stored = map(count_footprint, (dense, sparse))
    matrices = SMALL.num_layers * (4 * SMALL.model_dim**2 + 3 * SMALL.model_dim * SMALL.ffn_dim)
    assert plain.block_bytes - stored.block_bytes == pytest.approx(matrices * (16 - bits) / 8, rel=1e-3)
    assert stored.block_weights == plain.block_weights


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"sparsity": "exact", "weights": "int8"}, "sparsity 'exact' does not go with weights 'int8' yet"),
        ({"sparsity": "topk:99999"}, "sparsity 'topk:99999': a layer has 2048 features"),
        ({"sparsity": "exact", "dtype": "float16"}, "sparsity 'exact' has no products for float16"),
        ({"sparsity": "all"}, "unknown sparsity 'all'"),
    ],
)
def test_plans_and_programs_refuse_what_loading_refuses(options, told):
    given = {"batch": 1, "max_len": 128, "prompt_tokens": None}
    with pytest.raises(InvalidOption, match=told):
        planned(**options)
    with pytest.raises(InvalidOption, match=told):
        compile_programs(SMALL, "v5e:1x1", **given, **options)
    silu = replace(SMALL, activation="silu")
    with pytest.raises(InvalidOption, match="llama with silu has no zeros to leave out"):
        compile_programs(silu, "v5e:1x1", **given, sparsity="exact")


def test_a_live_share_is_one_of_a_sparse_step():
    for options, told in (
        ({"live_share": 0.5}, "name a sparsity too"),
        ({"live_share": 1.5, "sparsity": "exact"}, "live_share=1.5 is no share of blocks"),
    ):
        with pytest.raises(InvalidOption, match=told):
            planned(**options)
