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
        loaded = load(
            model,
            dtype=options.dtype,
            layers=options.layers,
            weights=options.weights,
            activations=options.activations,
            sparsity=options.sparsity,
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
    for name, path in adapters_of(options):
        loaded.loaded_adapters.load(name, path, notice=lambda line: print(line, file=sys.stderr))
    return loaded


def adapters_of(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the names and the paths of the adapters that the options name, where a command has such an option."""
    found = getattr(options, "adapter", None) or []
    return found if isinstance(found, list) else [found]


def adapter_of(options: argparse.Namespace) -> str | None:
    """Return the name of the adapter that all texts of a command use."""
    return next((name for name, _ in adapters_of(options)), None)
