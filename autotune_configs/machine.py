"""Faults of the machine (disk, memory, files, rights), which are none of the config that was compiled or launched."""

import errno
import os
import signal
import subprocess

#: What a compiler is killed by for its own fault. Other signals come from elsewhere, as where memory runs out.
_OWN_FAULTS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP}
_NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENOMEM, errno.EACCES, errno.EAGAIN, errno.EIO, errno.EROFS)
#: How errors that are no OSErrors tell of the machine's: those of compilers, and of PyTorch's and CUDA's allocators.
_TELLING = (
    "could not be opened",
    "out of memory",
    "t allocate memory",
    "alloc_failed",
    "t start new thread",
    *(os.strerror(number).lower() for number in _NUMBERS),
)


def is_killed(status: int | None) -> bool:
    """Whether a process of this exit status was ended by someone else."""
    return status is not None and status < 0 and -status not in _OWN_FAULTS


def fault_of_machine(error: BaseException) -> OSError | None:
    """The error, or one that it was raised for, as an OSError where that is the machine's fault, else None.

    Triton raises an error of its own for any within its code generator.
    """
    if isinstance(error, subprocess.CalledProcessError):  # of a tool that reads what was compiled, or builds a launcher
        return OSError(errno.EIO, f"{error} {(error.stderr or '').strip()}".strip())
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    for each in chain:
        if isinstance(each, OSError):
            return each
        if isinstance(each, MemoryError):
            return OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    for each in chain:
        was_killed = isinstance(each, subprocess.CalledProcessError) and is_killed(each.returncode)
        if was_killed or any(telling in str(each).lower() for telling in _TELLING):
            return OSError(errno.EIO, " ".join(str(error if was_killed else each).split())[:300])
    return None
