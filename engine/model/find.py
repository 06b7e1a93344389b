"""Whether a checkpoint is on this machine already. Nothing is fetched: ``engine.model.store`` does that."""

from pathlib import Path

from engine.model.store import HUB_FILES, KNOWN, cache_directory, checked_sha256, file_sha256


def find_model(name: str) -> Path | None:
    """The local path of ``name`` (as ``resolve_model`` takes it), or None where it would have to be fetched or is nowhere."""
    if name in KNOWN:
        path = cache_directory() / "models" / KNOWN[name].file_name
        known = checked_sha256(path) or (file_sha256(path) if path.is_file() else None)
        return path if known == KNOWN[name].sha256 else None
    path = Path(name).expanduser()
    if name and path.exists():
        return path
    return _in_hub_cache(name)


def _in_hub_cache(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True, allow_patterns=list(HUB_FILES)))
    except (HFValidationError, LocalEntryNotFoundError):
        return None
