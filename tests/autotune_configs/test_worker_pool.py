"""Worker processes: they end with their owner, whatever they do, and leave Ctrl-C to it."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from autotune_configs.worker_pool import WorkerPool

ROOT = Path(__file__).parents[2]


def is_there(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(is_so, seconds=60) -> bool:
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.02)
    return is_so()


def note_and_sleep(path: Path) -> None:
    path.with_suffix(".partial").write_text(str(os.getpid()))
    path.with_suffix(".partial").rename(path)
    time.sleep(600)


def noted(path: Path) -> int:
    assert wait_until(path.exists)
    return int(path.read_text())


def test_results():
    with WorkerPool(2) as pool:
        assert [future.result() for future in [pool.submit(pow, 2, power) for power in range(4)]] == [1, 2, 4, 8]


def test_workers_end_with_the_pool(tmp_path):
    """What they are doing is not waited for, and what is queued does not begin."""
    with WorkerPool(1) as pool:
        futures = [pool.submit(note_and_sleep, tmp_path / name) for name in ("first", "second")]
        worker = noted(tmp_path / "first")
    assert wait_until(lambda: not is_there(worker))
    assert all(future.done() for future in futures) and not (tmp_path / "second").exists()


def test_a_worker_that_dies(tmp_path):
    with WorkerPool(1) as pool, pytest.raises(BrokenProcessPool):
        pool.submit(os._exit, 3).result()


CODE = """
import sys
from pathlib import Path
from autotune_configs.worker_pool import WorkerPool
from tests.autotune_configs.test_worker_pool import note_and_sleep

if __name__ == "__main__":
    try:
        with WorkerPool(1) as pool:
            pool.submit(note_and_sleep, Path(sys.argv[1])).result()
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGKILL, -9)], ids=["Ctrl-C", "killed"])
def test_the_owner_ends(tmp_path, number, status):
    """A terminal's Ctrl-C goes to all processes of the group: only the owner answers it."""
    script = tmp_path / "script.py"
    script.write_text(CODE)
    owner = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "worker")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job inherits an ignored SIGINT, and so would this.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    worker = noted(tmp_path / "worker")
    if number == signal.SIGINT:
        os.killpg(owner.pid, number)
    else:
        owner.kill()
    error = owner.communicate(timeout=60)[1]
    assert owner.returncode == status and "Traceback" not in error
    assert wait_until(lambda: not is_there(worker))
