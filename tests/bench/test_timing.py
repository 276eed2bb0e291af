"""The bench's clocks, on a simulated device."""

import pytest

from bench.timing import BURST_CALLS, time_host


class Device:
    """Calls that the host queues in some microseconds and the device works on for some more.

    The time is that of the host; synchronize waits until the device has done what was queued.
    """

    def __init__(self):
        self.now = self.idle_at = 0.0
        self.queued = self.most_queued = self.synchronized = 0

    def clock(self):
        return self.now * 1e-6

    def synchronize(self):
        self.now = max(self.now, self.idle_at)
        self.queued = 0
        self.synchronized += 1

    def call(self, host, device):
        """``host`` gives the microseconds of one call after another."""

        def run():
            self.now += next(host)
            self.idle_at = max(self.idle_at, self.now) + device
            self.queued += 1
            self.most_queued = max(self.most_queued, self.queued)

        return run


def always(microseconds):
    while True:
        yield microseconds


@pytest.mark.parametrize("work", [1.0, 50_000.0], ids=["fast device", "slow device"])
def test_host_time_is_the_host_alone(work):
    device = Device()
    calls = {"ours": device.call(always(30.0), work), "eager": device.call(always(70.0), work)}
    times = time_host(calls, device.synchronize, device.clock)
    assert times == {"ours": pytest.approx(30.0), "eager": pytest.approx(70.0)}
    assert device.most_queued == BURST_CALLS  # of one peer: each begins with an idle device
    assert device.queued == 0


def test_median_over_bursts():
    """One slow call does not count."""

    def one_slow_call():
        yield 9e5
        yield from always(30.0)

    device = Device()
    times = time_host({"ours": device.call(one_slow_call(), 1.0)}, device.synchronize, device.clock)
    assert times["ours"] == pytest.approx(30.0)


def test_fewer_bursts_of_long_calls():
    """Three bursts suffice where all of them would take minutes."""
    device = Device()
    time_host({"ours": device.call(always(30.0), 1e6)}, device.synchronize, device.clock)
    assert device.synchronized == 3 + 1  # 5 s each


def test_a_short_time_takes_all_bursts():
    device = Device()
    time_host({"ours": device.call(always(30.0), 1.0)}, device.synchronize, device.clock)
    assert device.synchronized == 20 + 1
