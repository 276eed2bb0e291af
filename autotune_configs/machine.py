"""Faults of the machine (disk, memory, files, rights), which are none of the config that was compiled or launched."""

import errno
import os
import signal
import subprocess

#: What a compiler is killed by for its own fault. Other signals come from elsewhere, as where memory runs out.
_OWN_FAULTS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP}
#: How errors that are no OSErrors tell of the machine's: those of compilers, and of PyTorch's and CUDA's allocators.
_TELLING = (
    "could not be opened",
    "out of memory",
    "t allocate memory",
    "alloc_failed",
    *(os.strerror(number).lower() for number in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENOMEM, errno.EACCES)),
)


def is_killed(status: int | None) -> bool:
    """Whether a process of this exit status was ended by someone else."""
    return status is not None and status < 0 and -status not in _OWN_FAULTS


def fault_of_machine(error: BaseException) -> OSError | None:
    """The error as an OSError, where it is the machine's fault, else None."""
    if isinstance(error, OSError):
        return error
    if isinstance(error, MemoryError):
        return OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    if isinstance(error, subprocess.CalledProcessError):  # of a tool that reads what was compiled, or builds a launcher
        return OSError(errno.EIO, f"{error} {(error.stderr or '').strip()}".strip())
    text, process = str(error), error.__context__
    was_killed = isinstance(process, subprocess.CalledProcessError) and is_killed(process.returncode)
    if was_killed or any(each in text.lower() for each in _TELLING):
        return OSError(errno.EIO, " ".join(text.split())[:300])
    return None
