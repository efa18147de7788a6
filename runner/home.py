"""Where the home folder cannot be written, give every cache that would go there a stand-in."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)

# What this package and the libraries below it keep at home: the variable that moves it, its place at home
# and in the stand-in.
_KEPT = (
    ("XDG_CACHE_HOME", ".cache", ""),  # tokenised text, compiled kernels, wandb's own log
    ("MPLCONFIGDIR", ".config/matplotlib", "matplotlib"),
    ("TRITON_CACHE_DIR", ".triton/cache", "triton"),
)


def settle_home(*, tell: bool = True) -> None:
    """Send caches to a temporary folder if they cannot be kept at home; one line on standard error says so.

    What the environment sets already stays: a person chose it. Processes started later inherit it.
    """
    home = Path(os.path.expanduser("~"))
    lacking = [
        (name, inside) for name, at, inside in _KEPT if name not in os.environ and not usable(home / at)
    ]
    if not lacking:
        return
    try:
        folder = own_folder(Path(tempfile.gettempdir()) / f"runner-{os.getuid()}")
    except OSError:
        return  # nothing can be written anywhere: whoever has to write will say what it needs
    os.environ.update({name: str(folder / inside) for name, inside in lacking})
    if tell:
        log.warning(
            "the home folder %s cannot be written: caches go to %s (set %s to keep them elsewhere)",
            home,
            folder,
            lacking[0][0],
        )


def usable(folder: Path) -> bool:
    """Whether files can be made in `folder`, which need not exist yet."""
    there = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), Path())
    return folder.is_absolute() and there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def own_folder(path: Path) -> Path:
    """Return `path` if nobody else can write there, else a new folder: no file must be planted in it."""
    with contextlib.suppress(OSError):
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
            return path
    return Path(tempfile.mkdtemp(prefix=f"{path.name}-"))
