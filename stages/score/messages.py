"""What judge and candidate say to each other: plain values as JSON behind their length. Standard library only.

A value arrives as what it is: lists, tuples, sets and dictionaries keep their kind, an iterator its items. Anything
else arrives as an object that equals nothing, so no answer can be equal to everything.
"""

import json
import socket
import struct
from itertools import islice
from typing import Any

LARGEST = 8 << 20  # bytes of one message
ITEMS = 100_000  # taken from an iterator
_MADE = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "iter": iter}


def send(channel: socket.socket, value: Any) -> None:
    text = json.dumps(value).encode()
    channel.sendall(struct.pack("!Q", len(text)) + text)


def receive(channel: socket.socket) -> Any:
    """The next message; EOFError if the other side is gone, ValueError if it is too long or no JSON."""
    length = struct.unpack("!Q", _exactly(channel, 8))[0]
    if length > LARGEST:
        raise ValueError("answer too long")
    return json.loads(_exactly(channel, length))


def _exactly(channel: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = channel.recv(min(count - len(parts), 1 << 16))
        if not part:
            raise EOFError
        parts += part
    return parts


def encode(value: Any) -> Any:
    """Plain values as JSON that says their kind; anything else becomes an opaque name, equal to nothing."""
    if value is None or isinstance(value, bool | str):
        return value if value is None or isinstance(value, bool) else str.__str__(value)
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if hasattr(value, "__next__"):
        return {"iter": [encode(item) for item in islice(value, ITEMS)]}
    return {"opaque": type(value).__name__}


def decode(made: Any) -> Any:
    """The value of an encoded one."""
    if not isinstance(made, dict):
        return made
    ((kind, inner),) = made.items()
    if kind == "dict":
        return {decode(key): decode(item) for key, item in inner}
    if kind in ("complex", "range"):
        return {"complex": complex, "range": range}[kind](*inner)
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind == "opaque":
        return object()
    return _MADE[kind](map(decode, inner))
