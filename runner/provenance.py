"""Find out what a run is made of: code, packages, machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_PACKAGES = (
    "torch",
    "numpy",
    "hydra-core",
    "omegaconf",
    "safetensors",
    "tiktoken",
    "triton",
    "wandb",
    "xxhash",
)
_DIFF_BYTES = 200_000  # of uncommitted changes that are kept
_GIT_TIMEOUT_S = 10


def packages() -> dict[str, str]:
    """Return the versions of the packages that a run's bits depend on."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """Describe the machine: host, processor, memory, GPUs."""
    import torch  # here, as whoever only reads a manifest should neither wait for it nor be caught in it

    gpus = []
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "host": platform.node(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "gpus": gpus,
        "cuda": torch.version.cuda,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return commit and uncommitted changes of the checkout that holds the code; None outside of one."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    diff = _git(folder, "diff", "HEAD", "--no-color", "--no-ext-diff") or ""
    untracked = (_git(folder, "ls-files", "--others", "--exclude-standard") or "").splitlines()
    return {
        "commit": commit.strip(),
        "dirty": bool(diff or untracked),
        "diff": diff[:_DIFF_BYTES],
        "diff_cut": len(diff) > _DIFF_BYTES,
        "untracked": untracked[:100],
    }


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
