"""How long calls take on a GPU. Peers are timed interleaved, which cancels thermal drift."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from bench.cells import Call

_WARM_UP_CALLS = 3
#: More than any L2 cache holds. Writing it evicts the inputs.
_FLUSH_BYTES = 256 * 1024 * 1024
#: Cycles that the device waits at first, some milliseconds. The host queues the call meanwhile.
_FIRST_WAIT = 5_000_000
#: The longest wait, in cycles. A call that takes longer to queue synchronises with the device, and is timed with gaps.
LONGEST_WAIT = 80_000_000
#: Whole calls in a loop, and how many of them show the host's time. The launch queue holds 1024 kernels, and the host
#: waits for the device when it is full. The first calls fill half of it, at a hundred kernels a call.
LOOP_CALLS, QUEUED_CALLS = 20, 5
#: Loops of every peer: at most, at least, and the seconds after which no more are begun.
_LOOPS, _FEWEST_LOOPS, _LOOPS_SECONDS = 20, 3, 2.0

#: Microseconds by peer, of every round or loop.
Times = dict[str, list[float]]


def device_clock(
    device: torch.device, first_wait: int = _FIRST_WAIT, ready: Callable[[], object] = lambda: None
) -> Callable[[Call], float]:
    """Times one call on the device alone, in microseconds. It is queued while the device waits, for ``first_wait``
    cycles at first, and starts with a cold L2 cache; ``ready`` is queued ahead of it."""
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    waits: dict[Call, int] = {}

    def microseconds(call: Call) -> float:
        while True:
            wait = waits.setdefault(call, first_wait)
            torch.cuda._sleep(wait)
            flush.zero_()
            ready()
            start.record()
            call()
            end.record()
            was_queued_in_time = not start.query()
            torch.cuda.synchronize()
            if was_queued_in_time or wait >= LONGEST_WAIT:
                return start.elapsed_time(end) * 1e3
            waits[call] = 2 * wait

    return microseconds


def warm_up(call: Call) -> None:
    """Compile, tune and allocate ahead of the first timed call."""
    for _ in range(_WARM_UP_CALLS):
        call()
    torch.cuda.synchronize()


def time_rounds(calls: Mapping[str, Call], rounds: int, clock: Callable[[Call], float]) -> Times:
    """Of every call in every round, on the device. Each round starts with another call: none has a fixed place."""
    peers = list(calls)
    times: Times = {peer: [] for peer in peers}
    for number in range(rounds):
        first = number % len(peers)
        for peer in peers[first:] + peers[:first]:
            times[peer].append(clock(calls[peer]))
    return times


def time_loops(
    calls: Mapping[str, Call],
    synchronize: Callable[[], object],
    seconds: float = _LOOPS_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Times, Times]:
    """Of one call in every loop: what the host needs to queue it, and the wall clock of all.

    The device is idle when a loop begins, and the host does not wait for it within the first calls, so the device's own
    time does not count there. The wall clock stops when the device has done all calls. ``clock`` tells the time in
    seconds. After ``seconds`` no more loops are begun than are needed.
    """
    host: Times = {peer: [] for peer in calls}
    wall: Times = {peer: [] for peer in calls}
    begin = clock()
    for number in range(_LOOPS):
        if number >= _FEWEST_LOOPS and clock() - begin > seconds:
            break
        for peer, call in calls.items():
            synchronize()
            start = clock()
            for _ in range(QUEUED_CALLS):
                call()
            host[peer].append((clock() - start) / QUEUED_CALLS * 1e6)
            for _ in range(LOOP_CALLS - QUEUED_CALLS):
                call()
            synchronize()
            wall[peer].append((clock() - start) / LOOP_CALLS * 1e6)
    return host, wall


def time_calls(calls: Mapping[str, Call], rounds: int, device: torch.device) -> tuple[Times, dict[str, dict]]:
    """The times of all rounds, and each call's medians: of the device, of the host and of the wall clock."""
    in_rounds = time_rounds(calls, rounds, device_clock(device))
    host, wall = time_loops(calls, torch.cuda.synchronize)
    kinds = {"us": in_rounds, "host_us": host, "wall_us": wall}
    return in_rounds, {name: {kind: statistics.median(kinds[kind][name]) for kind in kinds} for name in calls}


def median_ratio(times: Mapping[str, Sequence[float]], one: str, other: str) -> float:
    return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))
