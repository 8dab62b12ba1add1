"""Loads the model that the options name."""

import argparse
import sys

from jaxinfer.cli.output.progress import byte_progress
from jaxinfer.cli.processes import join_processes
from jaxinfer.jax_setup import kept_folder, prepare_jax
from jaxinfer.language_model import LanguageModel
from jaxinfer.model_loading import DEFAULT_MODEL, load


def load_model(options: argparse.Namespace) -> LanguageModel:
    """Load with a progress bar; notices go to standard error."""
    prepare_jax()
    join_processes(options)
    model = DEFAULT_MODEL if options.model is None else options.model
    with byte_progress(model.rstrip("/").rpartition("/")[2]) as progress:
        return load(
            model,
            dtype=options.dtype,
            weights=options.weights,
            exact=options.exact,
            max_len=options.max_len,
            cache=options.cache,
            cache_dtype=options.cache_dtype,
            mesh=options.mesh,
            collectives=options.collectives,
            revision=options.revision,
            kept=kept_folder(),
            notice=lambda line: print(line, file=sys.stderr),
            progress=progress,
        )
