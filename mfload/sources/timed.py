"""What comes on a socket, within bounds of time and size for several reads together."""

from __future__ import annotations

import io
import math
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any


class Timed(io.RawIOBase):
    """The bytes of a socket, as a file.

    A timeout of the socket alone is begun anew by each byte, so that who sends one a second is
    never done.

    Args:
        connection: The socket.
        owner: What is closed with the file.
    """

    def __init__(self, connection: socket.socket, owner: Any = None) -> None:
        self._connection, self._owner = connection, owner
        self.expect(math.inf, float)
        self.allow(0)

    def allow(
        self,
        seconds: float,
        nbytes: int | None = None,
        *,
        least: int | None = None,
        total: float = math.inf,
    ) -> None:
        """Bounds all that is read from now on.

        Args:
            seconds: Time for it, or for each `least` bytes of it.
            nbytes: Bytes in all. Reads raise BufferError beyond.
            total: Seconds in all. Reads raise TimeoutError beyond.
        """
        now = time.monotonic()
        self._seconds, self._least, self._end = seconds, least, now + total
        self._until, self._came, self._left = now + seconds, 0, nbytes
        self._late = False

    def expect(self, seconds: float, late: Callable[[], float]) -> None:
        """Has a function called if a read ends later than in so many seconds.

        It raises an error of its own, or returns the seconds until it is called again.
        """
        self._expected, self._at_expected = time.monotonic() + seconds, late

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Receives something; 0 at the end."""
        now = time.monotonic()
        if self._least is not None and self._came >= self._least:
            self._until, self._came = now + self._seconds, 0
        left = min(self._until, self._end) - now
        if self._left is not None and self._left <= 0:
            raise BufferError("it is too long")
        if left <= 0 and self._late:
            raise TimeoutError("it took too long")
        # What is there by now is taken once: this thread may have been held up.
        self._late = left <= 0
        self._connection.settimeout(max(0.0, min(left, self._expected - now)))
        try:
            got = self._connection.recv_into(buffer)
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
            if now + left < self._expected:
                raise TimeoutError("it took too long") from None
            self.expect(self._at_expected(), self._at_expected)
            return self.readinto(buffer)
        self._came += got
        if self._left is not None:
            self._left -= got
        return got

    def close(self) -> None:
        """Closes it, and its owner."""
        super().close()
        if self._owner is not None:
            self._owner.close()
