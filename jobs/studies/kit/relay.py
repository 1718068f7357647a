"""Delay what passes a cable: join two TAP devices and hold every frame for a while, in both directions alike.

    relay.py DEVICE DEVICE SECONDS        # makes both, says "ready", and relays until it is ended
    kill -USR2 PID; kill -USR1 PID        # frames go on at once; are held again

The same as `tc netem delay`, for kernels that lack it. The devices take and give segments of up to 64 KiB as they are
(TSO), so that at 1 Gbit/s this process handles a few thousand of them per second, and not each packet.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import sys
import time
from collections import deque
from contextlib import suppress

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000  # a header before each frame says how to segment it
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6 = 0x01, 0x02, 0x04
LONGEST = 1 << 17  # bytes: a segment with all headers
AT_ONCE = 64  # frames read before some are written again


def tap(name: str) -> int:
    """Make a TAP device; return its descriptor."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)
    return device


class Direction:
    """Hold the frames from one device to the other until each is due."""

    def __init__(self, source: int, dest: int, delay_s: float):
        self._source, self._dest, self.delay_s = source, dest, delay_s
        self._held: deque[tuple[float, bytes]] = deque()

    @property
    def due_s(self) -> float:
        """Return when the next frame is to go on."""
        return self._held[0][0] if self._held else float("inf")

    def take(self) -> None:
        """Hold what has arrived."""
        for _ in range(AT_ONCE):
            try:
                frame = os.read(self._source, LONGEST)
            except BlockingIOError:
                return
            self._held.append((time.monotonic() + self.delay_s, frame))

    def pass_on(self) -> None:
        """Write what is due."""
        while self.due_s <= time.monotonic():
            try:
                os.write(self._dest, self._held.popleft()[1])
            except OSError:
                pass  # that end is not up: the frame is lost, as on a cable


def relay(first: int, second: int, delay_s: float) -> None:
    """Pass frames between two devices, for ever."""
    directions = {first: Direction(first, second, delay_s), second: Direction(second, first, delay_s)}

    def hold(number: int, frame: object) -> None:
        for direction in directions.values():
            direction.delay_s = delay_s if number == signal.SIGUSR1 else 0.0

    signal.signal(signal.SIGUSR1, hold)
    signal.signal(signal.SIGUSR2, hold)
    print("ready", flush=True)
    while True:
        due_s = min(direction.due_s for direction in directions.values())
        left_s = None if due_s == float("inf") else max(0.0, due_s - time.monotonic())
        arrived, *_ = select.select([first, second], [], [], left_s)
        for device in arrived:
            directions[device].take()
        for direction in directions.values():
            direction.pass_on()


if __name__ == "__main__":
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))  # a cable waits for no processor
    devices = [tap(name) for name in sys.argv[1:3]]
    relay(*devices, float(sys.argv[3]))
