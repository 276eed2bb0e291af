"""Promise: a command ends as others do (Ctrl-C, signals, a closed pipe, a lost GPU), and what was measured is kept."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest

from autotune_configs import __main__ as program
from autotune_configs import commands as cli
from autotune_configs import tables
from autotune_configs.command_line import run_command
from autotune_configs.sweep import DeviceLost
from tests.autotune_configs.commands import CPU_TABLE, ROOT, SMALL, run
from tests.autotune_configs.entries import GPU, entry


def test_a_gpu_that_is_lost(folder, capsys, monkeypatch):
    def lose(*arguments, **options):
        raise DeviceLost("group_norm bfloat16 4x32x8: an illegal memory access")

    monkeypatch.setattr(cli.sweep, "sweep_and_store", lose)
    status, output = run(*SMALL, "4x32x8", capsys=capsys)
    assert (
        status == 1
        and "an illegal memory access" in output
        and "continues after this config, in a new process" in output
    )


def test_a_killed_sweep_goes_on(folder, tmp_path):
    """Killed for good, not interrupted: what it had measured is not measured again."""
    command = [sys.executable, "-m", "autotune_configs", *SMALL, "16x256x8"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, cwd=ROOT)
    journals = folder / "sweeps" / "cpu"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        lines = [line for file in journals.glob("*.jsonl") for line in file.read_text().splitlines() if line]
        if len(lines) >= 3:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (journal,) = journals.glob("*.jsonl")
    known = [json.loads(line) for line in journal.read_text().splitlines() if line.endswith("}")]
    assert len(known) >= 3 and not tables.user_path(CPU_TABLE).exists()
    for outcome in known[1:]:  # so that it shows whether the journal is believed; the first is the heuristic's
        outcome.update(ratio=None, reason="marked")
    journal.write_text("".join(json.dumps(outcome) + "\n" for outcome in known))
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert finished.returncode == 0, finished.stderr
    (stored,) = tables.read(tables.user_path(CPU_TABLE), CPU_TABLE)
    assert stored.problem.sizes == (16, 256, 8) and not journal.exists()
    assert int(re.search(r"\((\d+) refused\)", finished.stdout)[1]) == len(known) - 1


@pytest.mark.parametrize("command", ["show --csv", "sweep export -"])
def test_a_reader_that_has_seen_enough(folder, command):
    """As in ``show --csv | head -1``."""
    tables.store(tables.user_path(GPU), GPU, entry())
    process = subprocess.Popen(
        [sys.executable, "-m", "autotune_configs", *command.split(), "--gpu", "h200"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    assert "rror" not in process.stderr.read() and process.wait() == 1


@pytest.mark.parametrize("command", ["show", "check", "sweep", "sweep export -", "sweep merge x"])
def test_ctrl_c(folder, capsys, monkeypatch, command):
    """A status of its own, and no traceback, whatever it interrupts."""

    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "INTERPRETED", command != "check")
    monkeypatch.setattr(cli.tables, "content", interrupt)
    monkeypatch.setattr(cli.sweep, "sweep_and_store", interrupt)
    assert program.main(command.split()) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "command, expected",
    [("show", 0), ("check", 1), ("sweep", 2), ("sweep export -", 2), ("sweep merge {path}", 2), ("check {path}", 1)],
)
@pytest.mark.parametrize("function", ["content", "json.loads"])
def test_memory_that_runs_out_in_a_table(folder, capfd, recwarn, monkeypatch, command, expected, function):
    """The line names the table. ``show`` tells what is found without it."""
    monkeypatch.setattr(cli, "INTERPRETED", not command.startswith("check"))
    path = tables.user_path(CPU_TABLE)
    tables.store(path, CPU_TABLE, entry())
    monkeypatch.setattr(f"autotune_configs.tables.{function}", mock.Mock(side_effect=MemoryError))
    try:
        status = program.main(command.format(path=path).split())
    except SystemExit as exit:
        status = exit.code
    assert status == expected
    output, errors = capfd.readouterr()
    lines = [*(output + errors).splitlines(), *(str(warning.message) for warning in recwarn)]
    assert any(str(path) in line and line.endswith("Cannot allocate memory") for line in lines)


def test_ctrl_c_while_torch_loads(folder, monkeypatch):
    import builtins

    load = builtins.__import__

    def interrupted(name, *arguments, **options):
        if name == "torch":
            raise KeyboardInterrupt
        return load(name, *arguments, **options)

    for name in [name for name in sys.modules if name.startswith("autotune_configs.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("autotune_configs.commands")
    monkeypatch.setattr(builtins, "__import__", interrupted)
    assert program.main(["show"]) == 130


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_sweep_that_is_ended(folder, number):
    """By another process, it shows the cursor again, and how it continues, as after Ctrl-C."""
    shown, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "autotune_configs", *SMALL, "64x512x8"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "200"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # else ignored below nohup
    )
    os.close(terminal)
    output = b""
    with open(shown, "rb", buffering=0) as reader:
        while b"config" not in output:
            output += reader.read(1000)
        process.send_signal(number)
        with contextlib.suppress(OSError):  # how a terminal ends
            while more := reader.read(1000):
                output += more
    assert process.wait() == 128 + number
    hides, shows = output.rfind(b"\x1b[?25l"), output.rfind(b"\x1b[?25h")
    assert 0 <= hides < shows and b"Interrupted. The same command continues from here." in output
    assert b"Traceback" not in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_is_ignored_stays_so(number):
    """As by nohup. Afterwards, the handlers are as before."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        assert run_command(lambda: os.kill(os.getpid(), number) or 5) == 5
        assert signal.getsignal(number) == signal.SIG_IGN
        signal.signal(number, signal.SIG_DFL)
        assert run_command(lambda: os.kill(os.getpid(), number) or 5) == 128 + number
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_command_in_a_thread():
    """It answers no signals, and runs."""
    statuses = []
    thread = threading.Thread(target=lambda: statuses.append(run_command(lambda: 3)))
    thread.start()
    thread.join()
    assert statuses == [3]
