"""A split GGUF is one model, whichever part is named; a missing or foreign part is named in one line."""

import shutil

import numpy as np
import pytest

from jaxinfer.checkpoint.gguf.file import open_gguf
from jaxinfer.checkpoint.open import open_checkpoint
from jaxinfer.errors import CheckpointNotFound, InvalidCheckpoint
from tests.checkpoint.gguf import files

F32 = np.dtype(np.float32)


@pytest.fixture(scope="module")
def made() -> dict[str, np.ndarray]:
    return files.hf_tensors(bias=True)


@pytest.fixture(scope="module")
def sound(tmp_path_factory, made):
    folder = tmp_path_factory.mktemp("sound")
    assert len(files.write_parts(folder, files.gguf_tensors(made), 12)) == 3
    return folder


@pytest.fixture
def parts(tmp_path, sound):
    """Return the paths of the three parts, in a folder of the test's own."""
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    return sorted(tmp_path.glob("m-*.gguf"))


def refuse(path, message):
    with pytest.raises(InvalidCheckpoint, match=message) as error:
        open_gguf(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_any_part_opens_the_whole_model(parts, made, index):
    checkpoint = open_checkpoint(parts[index])
    assert checkpoint.tensors.shapes() == {name: values.shape for name, values in made.items()}
    for name, values in made.items():
        np.testing.assert_array_equal(checkpoint.tensors.read(name, F32), values)
    whole = open_gguf(files.write_gguf(parts[0].with_name("whole.gguf"), files.gguf_tensors(made)))
    assert checkpoint.config == whole.config
    assert whole.gguf_metadata is not None
    assert whole.gguf_metadata.items() <= (checkpoint.gguf_metadata or {}).items()


def test_a_first_part_without_tensors_is_read(tmp_path, made):
    parts = files.write_parts(tmp_path, files.gguf_tensors(made), 12, small_first_shard=True)
    assert len(parts) == 4
    assert open_gguf(parts[0]).tensors.shapes().keys() == made.keys()


def test_weights_stay_in_the_files(parts, made):
    """Tensors of the file's own type and order are views, of the file that each lies in."""
    checkpoint = open_gguf(parts[0])
    names = [name for name in made if "q_proj" not in name and "k_proj" not in name]
    assert len(names) > 12
    for name in names:
        view = checkpoint.tensors.read(name, F32)
        assert not view.flags.owndata
        assert not view.flags.writeable


def test_the_cache_of_a_hub_may_link_the_parts(parts, tmp_path, made):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for index, part in enumerate(parts):
        part.rename(blobs / str(index))
        part.symlink_to(blobs / str(index))
    assert open_gguf(parts[1]).tensors.shapes().keys() == made.keys()


@pytest.mark.parametrize("named", [0, 2])
def test_a_missing_part_is_named(parts, named):
    parts[1].unlink()
    refuse(parts[named], r"m-00002-of-00003\.gguf: this part of a split GGUF of 3 parts is missing; fetch it")


def test_a_missing_part_that_is_asked_for_does_not_exist(parts):
    parts[0].unlink()
    with pytest.raises(CheckpointNotFound, match=r"m-00001-of-00003\.gguf"):
        open_checkpoint(parts[0])


def test_a_renamed_part_is_told_its_name(parts):
    renamed = parts[0].rename(parts[0].with_name("model.gguf"))
    refuse(renamed, r"model\.gguf: it is part 1 of 3 .*rename it to NAME-00001-of-00003\.gguf")
    swapped = parts[1].rename(parts[1].with_name("m-00001-of-00003.gguf"))
    refuse(swapped, "it is part 2 of 3")


def test_a_part_in_anothers_place_is_named(parts):
    shutil.copy(parts[1], parts[2])
    refuse(parts[0], r"m-00003-of-00003\.gguf: split\.no is 1, not 2: .*another model")


def test_a_part_of_a_split_of_another_length_is_named(parts, tmp_path, made):
    (tmp_path / "other").mkdir()
    others = files.write_parts(tmp_path / "other", files.gguf_tensors(made), 6)
    shutil.copy(others[1], parts[1])
    refuse(parts[0], rf"m-00002-of-00003\.gguf: split\.count is {len(others)}, not 3")


def test_a_whole_file_in_a_parts_place_is_named(parts, made):
    files.write_gguf(parts[1], files.gguf_tensors(made))
    refuse(parts[0], r"m-00002-of-00003\.gguf: split\.count is None, not 3")


def test_a_part_of_a_larger_model_is_named(parts, tmp_path, made):
    (tmp_path / "other").mkdir()
    more = files.gguf_tensors(made) | {"output.weight": made["model.embed_tokens.weight"]}
    shutil.copy(files.write_parts(tmp_path / "other", more, 12)[1], parts[1])
    refuse(parts[2], r"m-00002-of-00003\.gguf: split\.tensors\.count is 29, but 28 in the first part")


def test_a_tensor_in_two_parts_is_named_with_both(parts, tmp_path, made):
    (tmp_path / "other").mkdir()
    turned = dict(reversed(files.gguf_tensors(made).items()))
    shutil.copy(files.write_parts(tmp_path / "other", turned, 12)[2], parts[2])
    refuse(parts[0], r"m-00003-of-00003\.gguf: tensor '.*' is also in m-00001-of-00003\.gguf")


def test_a_wrong_number_of_tensors_is_told(parts):
    for part in parts:
        data = bytearray(part.read_bytes())
        at = data.index(b"split.tensors.count") + len(b"split.tensors.count") + 4
        data[at] = 31
        part.write_bytes(data)
    refuse(parts[0], r"its 3 parts hold 28 tensors, not the 31 of split\.tensors\.count in m-00001-of-00003\.gguf")


@pytest.mark.parametrize("damage", [b"", b"GGUF\3\0\0\0", b"not a model at all"])
def test_a_damaged_part_is_named(parts, damage):
    parts[1].write_bytes(damage)
    refuse(parts[0], r"m-00002-of-00003\.gguf: .*")


@pytest.mark.parametrize(
    ("key", "value"), [("split.no", "x"), ("split.no", 7), ("split.count", "3"), ("split.no", None)]
)
def test_a_place_that_is_no_number_is_refused(tmp_path, made, key, value):
    keys = {"split.no": 0, "split.count": 3} | {key: value}
    path = files.write_gguf(tmp_path / "m-00001-of-00003.gguf", files.gguf_tensors(made), keys=keys)
    refuse(path, "damaged split GGUF: it says to be part")


@pytest.mark.parametrize("count", [0, 1])
def test_a_split_of_one_is_a_whole_file(tmp_path, made, count):
    keys = {"split.no": 0, "split.count": count}
    path = files.write_gguf(tmp_path / "m.gguf", files.gguf_tensors(made), keys=keys)
    assert open_gguf(path).tensors.shapes().keys() == made.keys()
