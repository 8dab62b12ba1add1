"""Fetches a model's folder from the Hugging Face hub into huggingface_hub's cache."""

import threading
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.utils import tqdm as hub_progress_bar

from jaxinfer.checkpoint.hf_folder import PICKLE_SUFFIXES, refuse_pickle
from jaxinfer.checkpoint.hub.progress import watched_folder
from jaxinfer.errors import CheckpointNotFound, DownloadFailed, JaxinferError

_WANTED = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")
_UNWANTED = ("*/*", "consolidated*")
_PROBE_SECONDS = 4.0


def fetch_snapshot(
    repo_id: str,
    revision: str | None = None,
    token: str | None = None,
    offline: bool | None = None,
    cache_dir: Path | None = None,
    endpoint: str | None = None,
    notice: Callable[[str], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    wanted: Sequence[str] | None = None,
) -> Path:
    """Return the local folder of a hub model; fetch files that the cache lacks.

    ``wanted`` are the files to fetch, by their paths there; None is what models are loaded from.
    ``offline`` None follows huggingface_hub's own setting. A hub that does not answer within 4 seconds is unreachable:
    then a complete cached snapshot is used, and ``notice`` says so. ``progress`` receives bytes done and bytes in
    total. Raises :class:`CheckpointNotFound` or :class:`DownloadFailed`.
    """
    site = endpoint or constants.ENDPOINT
    where = {"repo_id": repo_id, "revision": revision, "cache_dir": cache_dir}
    if constants.HF_HUB_OFFLINE if offline is None else offline:
        absent = CheckpointNotFound(f"{repo_id}: not in the hub cache, and offline mode is on")
        return _cached(where, absent, wanted)
    try:
        api = huggingface_hub.HfApi(endpoint=site, token=token)
        info = _within_probe_time(
            lambda: api.model_info(repo_id, revision=revision, files_metadata=True, timeout=_PROBE_SECONDS)
        )
    except (errors.HfHubHTTPError, errors.HFValidationError, errors.OfflineModeIsEnabled) as error:
        raise _explain(error, repo_id, revision, site) from None
    except Exception as error:  # transport errors: their classes differ between versions of huggingface_hub
        folder = _cached(where, _explain(error, repo_id, revision, site), wanted)
        if notice is not None:
            notice(f"{site} is unreachable; using the cached snapshot of {repo_id}")
        return folder
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or () if _is_wanted(file.rfilename, wanted)}
    names = [file.rfilename for file in info.siblings or ()]
    _require(repo_id, wanted, names) if wanted else _require_safetensors(repo_id, sizes, names)
    try:
        with watched_folder(_blobs(repo_id, cache_dir), sum(sizes.values()), progress):
            return _snapshot(wanted, **where, token=token, endpoint=site, etag_timeout=_PROBE_SECONDS)
    except Exception as error:
        raise _explain(error, repo_id, revision, site) from None


def _within_probe_time(call: Callable[[], Any]) -> Any:
    """Return the call's result, or raise TimeoutError. Runs in a thread, because name resolution has no time limit."""
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["result"] = call()
        except Exception as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_PROBE_SECONDS)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {_PROBE_SECONDS:g} s")
    if "error" in outcome:
        raise outcome["error"]
    return outcome["result"]


def _cached(where: dict[str, Any], otherwise: JaxinferError, wanted: Sequence[str] | None) -> Path:
    try:
        folder = _snapshot(wanted, **where, local_files_only=True)
    except (errors.LocalEntryNotFoundError, errors.HFValidationError, OSError):
        raise otherwise from None
    if not all((folder / name).exists() for name in wanted or ()):
        raise otherwise
    return folder


def _snapshot(wanted: Sequence[str] | None, **options: Any) -> Path:
    patterns = {"allow_patterns": list(wanted or _WANTED), "ignore_patterns": [] if wanted else list(_UNWANTED)}
    return Path(huggingface_hub.snapshot_download(tqdm_class=_NoBar, **patterns, **options))


def _is_wanted(name: str, wanted: Sequence[str] | None) -> bool:
    if wanted is not None:
        return name in wanted
    return any(fnmatch(name, wanted) for wanted in _WANTED) and not any(fnmatch(name, bad) for bad in _UNWANTED)


def _require_safetensors(repo_id: str, wanted: Iterable[str], names: Iterable[str]) -> None:
    if any(name.endswith(".safetensors") for name in wanted):
        return
    for name in names:
        if name.endswith(PICKLE_SUFFIXES):
            raise refuse_pickle(Path(repo_id, name))
    raise CheckpointNotFound(f"{repo_id}: the hub holds no safetensors for this model; take another one")


def _require(repo_id: str, wanted: Sequence[str], names: Sequence[str]) -> None:
    for name in wanted:
        if name not in names:
            for suffix in PICKLE_SUFFIXES:
                if (pickled := str(Path(name).with_suffix(suffix))) in names:
                    raise refuse_pickle(Path(repo_id, pickled))
            raise CheckpointNotFound(f"{repo_id}: the hub holds no {name} there")


def _explain(error: Exception, repo_id: str, revision: str | None, site: str) -> JaxinferError:
    """Turn an error of huggingface_hub or its transport into one line that says how to fix it."""
    if isinstance(error, errors.GatedRepoError):
        return DownloadFailed(f"{repo_id}: gated; accept its terms at {site}/{repo_id} and pass a token")
    if isinstance(error, errors.RepositoryNotFoundError):
        return CheckpointNotFound(f"{repo_id}: no such folder here and no such model at {site}, or it needs a token")
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointNotFound(f"{repo_id}: no revision {revision!r} at {site}")
    if isinstance(error, errors.HFValidationError):
        return CheckpointNotFound(f"{repo_id!r} is neither a path that exists nor a hub id (organization/name)")
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code if error.response is not None else "no status"
        mend = "pass a valid token" if status in (401, 403) else "try again later"
        return DownloadFailed(f"{repo_id}: {site} answered {status}; {mend}")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return DownloadFailed(f"{repo_id}: huggingface_hub is in offline mode")
    reason = " ".join(str(error).split()) or type(error).__name__
    return DownloadFailed(f"{repo_id}: could not be fetched from {site} ({reason}); check the connection")


def _blobs(repo_id: str, cache_dir: Path | None) -> Path:
    return Path(cache_dir or constants.HF_HUB_CACHE) / f"models--{repo_id.replace('/', '--')}" / "blobs"


class _NoBar(hub_progress_bar):
    """A silent version of huggingface_hub's bar: the caller's callback shows the progress."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **{**options, "disable": True})
