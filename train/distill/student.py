"""The student model: loaded, newly drawn, or cut out of its teacher."""

from dataclasses import replace
from os.path import expanduser
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoint.hf_folder import read_json_object
from jaxinfer.checkpoint.open import open_checkpoint
from jaxinfer.errors import InvalidOption
from jaxinfer.language_model import LanguageModel
from jaxinfer.model_loading import load
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import init_params
from jaxinfer.models.families.registry import decoder_config
from jaxinfer.notation import Params
from jaxinfer.ops.backend import choose_backend
from train.model.export import describe_config


class Student(NamedTuple):
    """A student before training, with float32 parameters and stacked layers; ``origin`` describes it."""

    config: DecoderConfig
    params: Params
    origin: str


def open_student(name: str, teacher: LanguageModel, seed: int) -> Student:
    """Load a model, or draw one from a ``config.json``; raise an error if its tokens differ from the teacher's."""
    path = Path(expanduser(name))
    if path.suffix == ".json" and path.is_file():
        config = decoder_config(read_json_object(path))
        _check_vocabulary(config, teacher, name)
        params = init_params(config, choose_backend("float32", scan_layers=True), jax.random.key(seed))
        return Student(config, params, f"new weights of {path.name}")
    checkpoint = open_checkpoint(name)
    _check_vocabulary(decoder_config(checkpoint.config), teacher, name)
    if not teacher.speaks_like(checkpoint):
        raise InvalidOption(
            f"--student {name}: its tokenizer gives other ids than the teacher's: choose another student"
        )
    lm = load(name, dtype="float32", scan_layers=True)
    return Student(lm.config, lm.params, name)


def prune_layers(teacher: LanguageModel, layers: tuple[int, ...]) -> Student:
    """Keep some of the teacher's layers, and everything outside the layers."""
    describe_config(teacher.config)  # families that can be written have layers of one kind: one stack
    config = replace(teacher.config, num_layers=len(layers))
    blocks = teacher.params["blocks"]
    if len(layers) == 1:
        kept = {"layer_0": jax.tree.map(lambda leaf: leaf[layers[0]], blocks)}
    else:
        kept = jax.tree.map(lambda leaf: leaf[jnp.asarray(layers)], blocks)
    # Copied: a train step consumes its parameters, and the teacher is still needed.
    params = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), {**teacher.params, "blocks": kept})
    return Student(config, params, f"layers {', '.join(map(str, layers))} of its teacher")


def choose_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """Parse ``--student-layers``: layer indices, or how many layers to take, evenly spaced from first to last."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidOption(f"--student-layers {text}: give a number, or indices such as 0,2,5") from None
    if len(numbers) == 1:
        (count,) = numbers
        if not 1 <= count <= num_layers:
            raise InvalidOption(f"--student-layers {count}: give a number from 1 to {num_layers}")
        return tuple(int(layer) for layer in np.round(np.linspace(0, num_layers - 1, count)))
    if list(numbers) != sorted(set(numbers)) or not 0 <= numbers[0] <= numbers[-1] < num_layers:
        raise InvalidOption(f"--student-layers {text}: give rising indices from 0 to {num_layers - 1}")
    return numbers


def _check_vocabulary(config: DecoderConfig, teacher: LanguageModel, name: str) -> None:
    if config.num_tokens != teacher.config.num_tokens:
        raise InvalidOption(
            f"--student {name}: has {config.num_tokens} tokens, the teacher {teacher.config.num_tokens}: choose a "
            "student of the same vocabulary"
        )
