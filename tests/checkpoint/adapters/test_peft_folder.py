"""What a PEFT folder says is followed, and what does not fit or is not followed is refused by one line."""

import math
from dataclasses import replace

import numpy as np
import pytest

from jaxinfer.checkpoint.adapters.merged import MergedTensors
from jaxinfer.checkpoint.adapters.peft_folder import WEIGHTS, open_adapter
from jaxinfer.checkpoint.adapters.settings import CONFIG, read_settings
from jaxinfer.errors import JaxinferError
from jaxinfer.models.families.registry import family_of
from tests.toy_adapters import edit_adapter, with_magnitudes, write_adapter
from tests.toys import TINY_LLAMA

NAMES = family_of({"model_type": "llama"}).tensor_names(TINY_LLAMA)
QUERY = "model.layers.{}.self_attn.q_proj"
DOWN = "model.layers.{}.mlp.down_proj"
SHAPES = {"lm_head.weight": (262, 32), "model.embed_tokens.weight": (262, 32)}
KEY = f"base_model.model.{QUERY.format(0)}.lora_A.weight"


def opened(folder):
    return open_adapter(folder, NAMES, TINY_LLAMA, SHAPES)


@pytest.fixture
def folder(tmp_path):
    return write_adapter(tmp_path / "adapter", TINY_LLAMA, only=("attention.query", "mlp.down"))


def settings_of(folder, **changes):
    return read_settings(edit_adapter(folder, lambda settings, tensors: settings.update(changes)))


def test_matrices_are_those_of_the_file_and_scaled(folder):
    adapter = opened(folder)
    assert set(adapter.matrices) == {f"{name.format(layer)}.weight" for name in (QUERY, DOWN) for layer in range(2)}
    found = {}
    edit_adapter(folder, lambda settings, tensors: found.update(tensors))
    low = adapter.matrices[f"{QUERY.format(0)}.weight"]
    np.testing.assert_array_equal(low.down_RI, found[KEY])
    np.testing.assert_array_equal(low.up_OR, 2 * found[KEY.replace("lora_A", "lora_B")])


def test_modules_that_are_called_otherwise_than_their_tensors_are_found(folder):
    """As transformers calls shared experts of Hunyuan 3, for one."""

    def rename(settings, tensors):
        settings["target_modules"] = ["asked", "down_proj"]
        for name in list(tensors):
            tensors[name.replace("self_attn.q_proj", "attention.asked")] = tensors.pop(name)

    plain = opened(folder)
    edit_adapter(folder, rename)
    names = replace(NAMES, modules={"self_attn.q_proj": "attention.asked"})
    found = open_adapter(folder, names, TINY_LLAMA, SHAPES)
    assert found.places == plain.places
    assert found.fingerprint == plain.fingerprint
    with pytest.raises(JaxinferError, match="no tensor of the model has that name"):
        opened(folder)


def test_what_is_changed_of_a_vision_model_is_left_out_as_the_vision_model_is(folder):
    plain = opened(folder)
    edit_adapter(
        folder,
        lambda settings, tensors: (
            settings.update(modules_to_save=["projector"]),
            tensors.update(
                {
                    "base_model.model.visual.0.q_proj.lora_A.weight": np.ones((4, 8), np.float32),
                    "base_model.model.visual.0.q_proj.lora_B.weight": np.ones((8, 4), np.float32),
                    "base_model.model.visual.projector.weight": np.ones((8, 8), np.float32),
                }
            ),
        ),
    )
    names = replace(NAMES, ignored=(r"visual\..*",), notice="text alone")
    assert open_adapter(folder, names, TINY_LLAMA, SHAPES).fingerprint == plain.fingerprint
    # Other tensors that a decoder does without are no vision model's.
    with pytest.raises(JaxinferError, match="visual"):
        open_adapter(folder, replace(names, notice=None), TINY_LLAMA, SHAPES)


def test_ranks_and_strengths_follow_patterns(folder):
    settings = settings_of(
        folder, r=4, lora_alpha=6, rank_pattern={"down_proj": 9, r"layers\.1\..*q_proj": 2}, alpha_pattern={"q_proj": 3}
    )
    query, other, down = QUERY.format(0), QUERY.format(1), DOWN.format(0)
    assert [settings.rank_of(module) for module in (query, other, down)] == [4, 2, 9]
    assert [settings.scale_of(module) for module in (query, other, down)] == [3 / 4, 3 / 2, 6 / 9]
    stabilized = settings_of(folder, use_rslora=True)
    assert stabilized.scale_of(down) == pytest.approx(6 / math.sqrt(9))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"target_modules": ["q_proj"]}, {QUERY.format(0), QUERY.format(1)}),
        ({"target_modules": ["roj"]}, set()),
        ({"target_modules": r".*\.1\..*_proj"}, {QUERY.format(1), DOWN.format(1)}),
        ({"target_modules": "all-linear"}, {name.format(layer) for name in (QUERY, DOWN) for layer in range(2)}),
        ({"target_modules": "all-linear", "exclude_modules": ["q_proj"]}, {DOWN.format(0), DOWN.format(1)}),
        ({"target_modules": ["q_proj", "down_proj"], "layers_to_transform": 1}, {QUERY.format(1), DOWN.format(1)}),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "layers"}, {QUERY.format(0)}),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": ["h"]}, set()),
        ({"target_modules": [QUERY.format(0)], "layers_to_transform": [1]}, {QUERY.format(0)}),
    ],
)
def test_targets_are_those_of_peft(folder, changes, expected):
    targets = settings_of(folder, **changes).targets
    modules = {name.format(layer) for name in (QUERY, DOWN) for layer in range(2)}
    assert {module for module in modules if targets(module)} == expected


def test_a_magnitude_is_the_norm_of_each_row(folder):
    low = opened(edit_adapter(folder, with_magnitudes)).matrices[f"{QUERY.format(0)}.weight"]
    kernel = np.random.default_rng(3).standard_normal((32, 32)).astype(np.float32)
    merged = low.added_to(kernel)
    np.testing.assert_allclose(np.linalg.norm(merged, axis=1), low.magnitude_O, rtol=1e-5)
    direction = kernel + low.up_OR @ low.down_RI
    np.testing.assert_allclose(merged / direction, (merged / direction)[:, :1] * np.ones((1, 32)), rtol=1e-3)


def test_merged_tensors_are_rounded_once(folder):
    class Source:
        def shapes(self):
            return {f"{QUERY.format(0)}.weight": (32, 32)}

        def read(self, name, dtype):
            return np.full((32, 32), 1.0, dtype)

    adapter = opened(folder)
    name = f"{QUERY.format(0)}.weight"
    low = adapter.matrices[name]
    found = MergedTensors(Source(), adapter).read(name, np.dtype(np.float16))
    np.testing.assert_array_equal(found, (1 + low.up_OR @ low.down_RI).astype(np.float16))
    np.testing.assert_array_equal(MergedTensors(Source(), adapter).read("other", np.dtype(np.float32)), 1)


def drop(settings, tensors):
    del tensors[KEY]


def rename(settings, tensors):
    tensors["base_model.model.lm_head.lora_A.weight"] = tensors[KEY]


def embed(settings, tensors):
    tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = tensors[KEY]


def save_whole(settings, tensors):
    tensors["base_model.model.lm_head.weight"] = tensors[KEY]


def widen(settings, tensors):
    for name in list(tensors):
        if "q_proj.lora_A" in name:
            tensors[name] = np.pad(tensors[name], ((0, 0), (0, 4)))


def spoil(settings, tensors):
    tensors[KEY] = tensors[KEY] * np.nan


def changed(**values):
    return lambda settings, tensors: settings.update(values)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop, "q_proj lacks lora_A.weight"),
        (rename, "lm_head lacks lora_B.weight"),
        (embed, "lacks .*embed_tokens.lora_embedding_B"),
        (save_whole, "its lm_head.weight has 4 tokens, but the model's has 262: .* whose vocabulary was changed"),
        (widen, r"as \[32, 36\], but the model's is \[32, 32\]"),
        (spoil, "numbers that are not finite"),
        (changed(r=5), "its rank is 5"),
        (changed(peft_type="IA3"), "peft_type 'IA3' is not supported: only LORA"),
        (changed(bias="some"), "bias = 'some' is none of none, all, lora_only"),
        (changed(lora_bias=True), "lacks lora_B.bias"),
        (changed(modules_to_save=["lm_head"]), "modules_to_save .* names lm_head, which has no tensors there"),
        (changed(trainable_token_indices=[3]), "names tokens, which have no rows there"),
        (changed(target_modules=["q_proj", "down_proj", "lm_head"]), "targets lm_head.weight, which has no matrices"),
        (changed(modules_to_save=3), "modules_to_save = 3 is no list of names"),
        (changed(trainable_token_indices=[3, 3]), r"trainable_token_indices = \[3, 3\] is no list of tokens"),
        (changed(init_lora_weights="pissa"), "init_lora_weights = 'pissa' changes the base model"),
        (changed(target_modules=["q_proj", "o_proj"]), "targets model.layers.0.self_attn.o_proj, which"),
        (changed(target_modules=["q_proj"]), "has matrices for model.layers.0.mlp.down_proj, which"),
        (changed(target_modules=None), "names no module"),
        (changed(target_modules="("), "is no pattern of names"),
        (changed(target_modules=3), "neither a pattern nor a list of names"),
        (changed(r=0), "r = 0 is not a whole number"),
        (changed(lora_alpha="x"), "lora_alpha = 'x' is not a number"),
        (changed(rank_pattern=[1]), "rank_pattern = .* is no object"),
        (changed(use_dora=1), "use_dora = 1 is neither true nor false"),
        (changed(use_dora=True), "lacks a? ?lora_magnitude_vector"),
        (with_magnitudes, None),
    ],
)
def test_what_does_not_fit_or_is_not_followed_is_refused_by_one_line(folder, edit, message):
    edit_adapter(folder, edit)
    if message is None:
        opened(folder)
        return
    with pytest.raises(JaxinferError, match=message) as caught:
        opened(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_pickled_files_are_named(folder, tmp_path):
    with pytest.raises(JaxinferError, match=f"no {CONFIG}: give a folder"):
        opened(tmp_path / "nowhere")
    (folder / WEIGHTS).rename(folder / "other")
    with pytest.raises(JaxinferError, match=f"no {WEIGHTS}"):
        opened(folder)
    (folder / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(JaxinferError, match="pickled weights can run any code"):
        opened(folder)
