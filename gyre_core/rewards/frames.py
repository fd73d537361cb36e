"""JSON messages over a socket, each behind its length in bytes, under a deadline."""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

_LENGTH = struct.Struct(">Q")


def send(connection: socket.socket, message: dict[str, Any], deadline: float | None = None) -> None:
    """Send a message whole. Raises TimeoutError at `deadline` (seconds of `time.monotonic`), OSError when the other
    side is gone, and ValueError or TypeError for what is not JSON."""
    data = json.dumps(message).encode()
    connection.settimeout(_remaining(deadline))
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket, deadline: float | None = None) -> dict[str, Any]:
    """The next message. Raises TimeoutError at `deadline` and EOFError when the other side is gone."""
    (length,) = _LENGTH.unpack(_receive_bytes(connection, _LENGTH.size, deadline))
    return json.loads(_receive_bytes(connection, length, deadline))


def _receive_bytes(connection: socket.socket, count: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < count:
        connection.settimeout(_remaining(deadline))
        chunk = connection.recv(min(count - len(data), 1 << 20))
        if not chunk:
            raise EOFError("the other side closed the connection")
        data += chunk
    return bytes(data)


def _remaining(deadline: float | None) -> float | None:
    """Seconds left, for `settimeout`; raises TimeoutError when there are none."""
    if deadline is None:
        return None
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("the deadline has passed")
    return seconds
