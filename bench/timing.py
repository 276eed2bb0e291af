"""How long calls take: peers in turn within each round, so that a device that slows as it warms slows for all."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from bench.chain import Call

WARM_UP_CALLS = 3
#: More than any L2 cache holds: writing it leaves nothing of the inputs there.
_FLUSH_BYTES = 256 * 1024 * 1024
#: How long the device first waits, in cycles: some milliseconds, in which the host queues the call.
_FIRST_WAIT = 5_000_000
#: A call that is still not queued after this long waits for the device itself, and is timed with its gaps.
_LONGEST_WAIT = 80_000_000
#: Calls that the host queues in a row while its time is taken: so few that even a hundred kernels a call fill no more
#: than half of the 1024 places in the launch queue. Were it full, the host would wait for the device.
BURST_CALLS = 5
#: Bursts of every peer, fewer where the device needs longer than this for all of them.
_BURSTS, _FEWEST_BURSTS, _BURSTS_SECONDS = 20, 3, 2.0


class _DeviceClock:
    """Times one call on the device alone: queued while the device waits, started with a cold L2 cache."""

    def __init__(self, device: torch.device):
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._waits: dict[Call, int] = {}

    def microseconds(self, call: Call) -> float:
        while True:
            wait = self._waits.setdefault(call, _FIRST_WAIT)
            torch.cuda._sleep(wait)
            self._flush.zero_()
            self._start.record()
            call()
            self._end.record()
            was_queued_in_time = not self._start.query()
            torch.cuda.synchronize()
            if was_queued_in_time or wait >= _LONGEST_WAIT:
                return self._start.elapsed_time(self._end) * 1e3
            self._waits[call] = 2 * wait


class _HostClock:
    """Times one call by the host's clock."""

    def microseconds(self, call: Call) -> float:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6


def warm_up(call: Call, device: torch.device) -> None:
    """Compile, tune and allocate ahead of the first timed call."""
    for _ in range(WARM_UP_CALLS if device.type == "cuda" else 1):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()


def time_rounds(calls: Mapping[str, Call], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Microseconds of every call in every round; each round starts with another call: none has a fixed place."""
    clock = _DeviceClock(device) if device.type == "cuda" else _HostClock()
    peers = list(calls)
    times: dict[str, list[float]] = {peer: [] for peer in peers}
    for number in range(rounds):
        first = number % len(peers)
        for peer in peers[first:] + peers[:first]:
            times[peer].append(clock.microseconds(calls[peer]))
    return times


def time_host(
    calls: Mapping[str, Call], synchronize: Callable[[], None], clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Microseconds that the host needs to queue one call, by peer: the median over bursts of calls.

    The device is idle as a burst begins and is not waited for within it, so however long it works does not count.
    ``clock`` tells the time in seconds.
    """
    bursts: dict[str, list[float]] = {peer: [] for peer in calls}
    begin = clock()
    for number in range(_BURSTS):
        if number >= _FEWEST_BURSTS and clock() - begin > _BURSTS_SECONDS:
            break
        for peer, call in calls.items():
            synchronize()
            start = clock()
            for _ in range(BURST_CALLS):
                call()
            bursts[peer].append((clock() - start) / BURST_CALLS * 1e6)
    synchronize()
    return {peer: statistics.median(times) for peer, times in bursts.items()}
