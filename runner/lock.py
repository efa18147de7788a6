"""Lock a file for as long as a process lives, where its file system knows locks."""

from __future__ import annotations

import errno
import fcntl

UNLOCKED = "%s: its file system has no locks; take care that no other command uses this %s meanwhile"
"""What to warn of where `try_lock` returns False: the folder, and the key that names it."""

_UNKNOWN = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Take a lock that ends with the last process that holds `fd`; return False where there are no locks.

    A network file system may be mounted without them (Lustre without `flock`, NFS without a lock daemon).

    Raises:
        BlockingIOError: another process holds it.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise
        return False
    return True
