"""The bench's clocks, on a simulated device."""

import pytest

from bench.timing import LOOP_CALLS, QUEUED_CALLS, time_loops


class Device:
    """Calls that the host queues in some microseconds and the device works on for some more.

    The time is that of the host; synchronize waits until the device has done what was queued.
    """

    def __init__(self):
        self.now = self.idle_at = 0.0
        self.queued = self.most_queued = 0

    def clock(self):
        return self.now * 1e-6

    def synchronize(self):
        self.now = max(self.now, self.idle_at)
        self.queued = 0

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


def are(times, microseconds):
    return times == pytest.approx([microseconds] * len(times))


@pytest.mark.parametrize("work", [1.0, 50_000.0], ids=["fast device", "slow device"])
def test_host_time_is_the_host_alone(work):
    device = Device()
    calls = {"ours": device.call(always(30.0), work), "eager": device.call(always(70.0), work)}
    host, wall = time_loops(calls, device.synchronize, clock=device.clock)
    assert host.keys() == wall.keys() == {"ours", "eager"}
    assert are(host["ours"], 30.0) and are(host["eager"], 70.0)
    assert device.most_queued == LOOP_CALLS  # of one peer: each begins with an idle device
    assert device.queued == 0


def test_wall_clock_is_of_what_is_slower():
    """The device's time where that is longer; else the host's, and the device's of the last call."""
    device = Device()
    calls = {"host": device.call(always(30.0), 4.0), "device": device.call(always(30.0), 500.0)}
    _, wall = time_loops(calls, device.synchronize, clock=device.clock)
    assert are(wall["host"], 30.0 + 4.0 / LOOP_CALLS)
    assert are(wall["device"], 500.0 + 30.0 / LOOP_CALLS)


def test_a_full_queue_does_not_count_as_the_host():
    """The host waits for the device after the first calls of each loop."""
    device = Device()

    def full_queue():
        while True:
            yield from [30.0] * QUEUED_CALLS + [500.0] * (LOOP_CALLS - QUEUED_CALLS)

    host, _ = time_loops({"ours": device.call(full_queue(), 500.0)}, device.synchronize, clock=device.clock)
    assert are(host["ours"], 30.0)


def test_loops_are_apart():
    """One slow call is in one loop."""

    def one_slow_call():
        yield 9e5
        yield from always(30.0)

    device = Device()
    host, _ = time_loops({"ours": device.call(one_slow_call(), 1.0)}, device.synchronize, clock=device.clock)
    assert host["ours"][0] > 1e5 and are(host["ours"][1:], 30.0)


def test_fewer_loops_of_long_calls():
    """Three loops suffice where all of them would take minutes."""
    device = Device()
    host, wall = time_loops({"ours": device.call(always(30.0), 1e6)}, device.synchronize, clock=device.clock)
    assert len(host["ours"]) == len(wall["ours"]) == 3  # 20 s each


def test_a_short_time_takes_all_loops():
    device = Device()
    call = device.call(always(30.0), 1.0)
    host, wall = time_loops({"ours": call}, device.synchronize, clock=device.clock)
    assert len(host["ours"]) == len(wall["ours"]) == 20
    host, wall = time_loops({"ours": call}, device.synchronize, seconds=0, clock=device.clock)
    assert len(host["ours"]) == len(wall["ours"]) == 3  # the same in every process
