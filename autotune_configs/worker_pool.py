"""Worker processes that end at once when their owner ends or gives them up.

This module loads no torch: a worker that has just started can already be ended.
"""

import contextlib
import multiprocessing
import multiprocessing.process
import os
import signal
import threading
import warnings
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.connection import Connection


class WorkerPool(ProcessPoolExecutor):
    """A pool of processes; leaving its context ends them, whatever they are doing.

    A worker that dies breaks the pool: ``submit`` and the futures then raise BrokenProcessPool.
    """

    def __init__(self, processes: int):
        # Not forked: a process that has a CUDA context or threads must not be.
        context = multiprocessing.get_context("spawn")
        # The system closes an owner's end of a pipe however the owner ends.
        self._reader, self._writer = context.Pipe(duplex=False)
        self._workers: list[multiprocessing.process.BaseProcess] = []
        super().__init__(processes, mp_context=context, initializer=_end_with_owner, initargs=(self._reader,))

    def __exit__(self, *exception):
        self._writer.close()
        with contextlib.suppress(RuntimeError):  # of a pool whose thread could not be started
            self.shutdown(cancel_futures=True)
        self._reader.close()

    def submit(self, function, /, *arguments, **options) -> Future:
        # A terminal sends Ctrl-C to workers, too. They start here and inherit the mask, so only the owner answers it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            future = super().submit(function, *arguments, **options)
            self._workers = [*self._processes.values()]
            return future
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def exit_statuses(self) -> list[int | None]:
        """Of the workers. Waits for them, and ends the pool."""
        self.shutdown()  # its thread waits: the system tells how a process ended once only, to whoever asks first
        return [worker.exitcode for worker in self._workers]


def _end_with_owner(reader: Connection) -> None:
    """Watch the pipe in a thread, and end this process when its other end closes. Its warnings are a line each."""
    warnings.formatwarning = lambda message, *_, **__: f"{message}\n"

    def watch():
        reader.poll(None)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
