"""The record beside prepared shards: what they were made from, and how far the work has come."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from runner.data.shard import read_header, write_whole
from runner.data.tokenizer import Tokenizer

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
TOKENIZER_FILE = "tokenizer.bin"

Manifest = dict[str, Any]


def read_manifest(folder: Path) -> Manifest | None:
    """Return a folder's manifest, or None if it has none; ValueError if it is damaged."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error}): remove the folder to start again") from None
    if not isinstance(manifest, dict) or manifest.get("version") != MANIFEST_VERSION:
        raise ValueError(
            f"{path}: not a manifest of version {MANIFEST_VERSION}: remove the folder to start again"
        )
    return manifest


def verify(folder: Path) -> list[str]:
    """Compare every shard with its manifest; return one line per problem."""
    manifest = read_manifest(folder)
    if manifest is None:
        return [f"{folder / MANIFEST}: no manifest, nothing to verify against"]
    problems = [] if manifest["complete"] else [f"{folder}: incomplete; the same command continues it"]
    for split in manifest["splits"].values():
        problems += [line for shard in split["shards"] for line in _shard_problems(folder, shard)]
    return problems


def _shard_problems(folder: Path, entry: dict[str, Any]) -> list[str]:
    path = folder / entry["file"]
    try:
        shard = read_header(path)
    except ValueError as error:
        return [str(error)]
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if shard.tokens != entry["tokens"] or digest != entry["sha256"]:
        return [f"{path}: differs from its manifest (sha256 {digest[:12]}..., {shard.tokens} tokens)"]
    return []


def fresh_manifest(tokenizer: Tokenizer, *, key: dict[str, Any], shard_tokens: int) -> Manifest:
    """Return the manifest of a folder without shards."""
    return {
        "version": MANIFEST_VERSION,
        "key": {
            **key,
            "tokenizer": {
                "name": tokenizer.name,
                "sha256": tokenizer.fingerprint(),
                "vocab_size": tokenizer.vocab_size,
                "eot": tokenizer.eot,
            },
            "shard_tokens": shard_tokens,
        },
        "complete": False,
        "splits": {
            split: {"documents": 0, "text_bytes": 0, "tokens": 0, "shards": []} for split in ("train", "val")
        },
    }


def start_or_continue(folder: Path, fresh: Manifest) -> Manifest:
    """Return the manifest to go on from; ValueError if the folder holds something else.

    Shards from the first damaged one on are forgotten, to be written again.
    """
    manifest = read_manifest(folder)
    if manifest is None or (manifest["key"] != _plain(fresh["key"]) and not _has_shards(manifest)):
        ours = set() if manifest is None else {TOKENIZER_FILE}
        if {path.name for path in folder.glob("*.bin")} - ours:
            raise ValueError(f"{folder}: holds .bin files that no {MANIFEST} lists: choose an empty folder")
        save_manifest(folder, fresh)
        return fresh
    if manifest["key"] != _plain(fresh["key"]):
        changed = [name for name in fresh["key"] if manifest["key"].get(name) != fresh["key"][name]]
        raise ValueError(
            f"{folder}: holds shards made from something else (differs in {', '.join(changed)}): "
            "choose another folder or remove this one"
        )
    if not manifest["complete"]:
        for split in manifest["splits"].values():
            damaged = (place for place, shard in enumerate(split["shards"]) if _shard_problems(folder, shard))
            del split["shards"][next(damaged, len(split["shards"])) :]
            split |= {"documents": 0, "text_bytes": 0, "tokens": sum(s["tokens"] for s in split["shards"])}
    return manifest


def _plain(key: dict[str, Any]) -> Any:
    """Return what a key reads back as."""
    return json.loads(json.dumps(key))


def _has_shards(manifest: Manifest) -> bool:
    """Whether there is anything that another start would lose."""
    return any(split["shards"] for split in manifest["splits"].values())


def save_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, whole or not at all."""
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1).encode() + b"\n")
