"""Texts tokenised once: shards in a cache folder, keyed by everything that determines them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from runner.data.build import Document, build, thread_count
from runner.data.manifest import Manifest, read_manifest
from runner.data.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


def cache_folder(cache: str | None) -> Path:
    """Return the folder of cached corpora: `cache`, else below XDG_CACHE_HOME, else below ~/.cache."""
    if cache is not None:
        return Path(cache).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "runner" / "data"


def cached(
    documents: Callable[[], Iterable[Document]],
    *,
    name: str,
    key: dict[str, Any],
    tokenizer: Tokenizer,
    cache: str | None,
) -> tuple[Path, Manifest]:
    """Return the folder with the shards of `documents` and its manifest, building it on first use.

    `key` must identify the documents (a hash of their text and every option that shapes them). The
    shards are made in a temporary folder that is renamed when complete: several processes may do
    so at once, one wins and all use its folder. ValueError if the cache cannot be written.
    """
    identity = json.dumps([key, tokenizer.name, tokenizer.fingerprint()], sort_keys=True)
    folder = cache_folder(cache) / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    manifest = _complete(folder)
    if manifest is None:
        _log.info("tokenising %s into %s", name, folder)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
        except OSError as error:
            raise ValueError(
                f"data.cache: cannot write to {folder.parent} ({error.strerror}): "
                "set data.cache or XDG_CACHE_HOME to a folder that can be written"
            ) from None
        try:
            build(documents(), temporary, tokenizer=tokenizer, key=key, workers=thread_count())
            _publish(temporary, folder)
        except OSError as error:
            raise ValueError(f"data.cache: cannot write below {folder.parent}: {error.strerror}") from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        manifest = _complete(folder)
    assert manifest is not None, folder
    return folder, manifest


def _publish(temporary: Path, folder: Path) -> None:
    temporary.chmod(0o755)
    try:
        temporary.rename(folder)
    except OSError:
        if _complete(folder) is None:  # not another process that was faster, but a damaged folder
            shutil.rmtree(folder)
            temporary.rename(folder)


def _complete(folder: Path) -> Manifest | None:
    try:
        manifest = read_manifest(folder)
    except ValueError:
        return None
    if manifest is None or not manifest["complete"]:
        return None
    shards = [shard for split in manifest["splits"].values() for shard in split["shards"]]
    return manifest if all((folder / shard["file"]).is_file() for shard in shards) else None
