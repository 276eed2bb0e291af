"""How long calls take on a GPU. Peers are timed interleaved, which cancels thermal drift."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from bench.chain import Call

WARM_UP_CALLS = 3
#: More than any L2 cache holds. Writing it evicts the inputs.
FLUSH_BYTES = 256 * 1024 * 1024
#: Cycles that the device waits at first, some milliseconds. The host queues the call meanwhile.
_FIRST_WAIT = 5_000_000
#: The longest wait, in cycles. A call that takes longer to queue synchronises with the device, and is timed with gaps.
_LONGEST_WAIT = 80_000_000
#: Calls that the host queues in a row while its time is taken. The launch queue holds 1024 kernels, and the host waits
#: for the device when it is full. These calls fill half of it, at a hundred kernels a call.
BURST_CALLS = 5
#: Bursts of every peer: at most, at least, and the seconds after which no more are begun.
_BURSTS, _FEWEST_BURSTS, _BURSTS_SECONDS = 20, 3, 2.0


class _DeviceClock:
    """Times one call on the device alone. It is queued while the device waits, and starts with a cold L2 cache."""

    def __init__(self, device: torch.device):
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
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


def warm_up(call: Call) -> None:
    """Compile, tune and allocate ahead of the first timed call."""
    for _ in range(WARM_UP_CALLS):
        call()
    torch.cuda.synchronize()


def time_rounds(calls: Mapping[str, Call], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Microseconds of every call in every round. Each round starts with another call: none has a fixed place."""
    clock = _DeviceClock(device)
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

    The device is idle when a burst begins, and the host does not wait for it within a burst, so the device's own time
    does not count. ``clock`` tells the time in seconds.
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


def median_ratio(times: Mapping[str, Sequence[float]], one: str, other: str) -> float:
    """The median over the rounds of the one's time over the other's in the same round."""
    return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))
