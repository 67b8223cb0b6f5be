"""What Linux itself can keep from a process, asked for through its system calls. Standard library only.

    lock_files(folder)      Landlock: no writing but beneath the folder, no TCP, no signals to processes outside
    leave_network()         an empty network namespace
    become(user, folder)    another user than root, who owns the folder and can read where its Python lies

Each says how far it got; where the kernel or the container does not let it, nothing is changed. Numbers are those of
the kernel's headers (linux/landlock.h, linux/prctl.h, linux/sched.h, linux/capability.h), equal on all its machines.
"""

import ctypes
import os
import struct
import sys

NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000  # flags of unshare(2)
DEATH_SIGNAL, DUMPABLE, KEEP_CAPABILITIES, SUBREAPER, NO_NEW_PRIVILEGES = 1, 4, 8, 36, 38  # options of prctl(2)
CREATE_RULES, ADD_RULE, RESTRICT = 444, 445, 446  # Landlock's calls
WRITE_FILE, TRUNCATE = 1 << 1, 1 << 14
CHANGES = {1: 0b1_1111_1111_0010, 2: 1 << 13, 3: TRUNCATE}  # rights to change files, by the version that brought them
TCP, SIGNALS = 0b11, 0b10  # bind and connect (version 4); signals beyond the process's own domain (version 6)
READ_ANYTHING = 1 << 2  # CAP_DAC_READ_SEARCH
CAPABILITIES = 0x20080522  # version of the layout


def prctl(option: int, value: int) -> bool:
    """Whether the kernel took it."""
    call = getattr(ctypes.CDLL(None), "prctl", None)
    return call is not None and call(option, ctypes.c_ulong(value), 0, 0, 0) == 0


def leave_network() -> bool:
    """Whether this process is now in a network namespace with nothing in it."""
    call = getattr(ctypes.CDLL(None), "unshare", None)
    return call is not None and (call(NEW_NETWORK) == 0 or call(NEW_USER | NEW_NETWORK) == 0)


def lock_files(folder: str) -> int:
    """Landlock's version, 0 without it. From then on files change beneath the folder alone (from 3 on in every way)."""
    version = max(0, _system_call(CREATE_RULES, None, 0, 1)) if sys.platform == "linux" else 0
    if not version:
        return 0
    rights = sum(bits for since, bits in CHANGES.items() if since <= version)
    wanted = struct.pack("QQQ", rights, TCP, SIGNALS)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    rules = _system_call(CREATE_RULES, wanted, len(wanted), 0)
    if rules < 0:
        return 0
    for place, allowed in ((folder, rights), (os.devnull, rights & (WRITE_FILE | TRUNCATE))):
        handle = os.open(place, os.O_RDONLY)
        _system_call(ADD_RULE, rules, 1, struct.pack("=Qi", allowed, handle), 0)
        os.close(handle)
    locked = prctl(NO_NEW_PRIVILEGES, 1) and _system_call(RESTRICT, rules, 0) == 0
    os.close(rules)
    return version if locked else 0


def become(user: int, folder: str, *, reading: tuple[str, ...]) -> bool:
    """Leave root behind and take the folder along. Where the user cannot read `reading`, the right to read anything is
    all that is kept of root's."""
    if os.geteuid() != 0:
        return False
    try:
        os.chown(folder, user, user)
        blind = not _readable_by(user, (*reading, folder))
        if blind and not prctl(KEEP_CAPABILITIES, 1):
            return False
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    except OSError:  # a container whose root may not be just anybody
        return False
    if blind:
        header, kept = struct.pack("Ii", CAPABILITIES, 0), struct.pack("6I", READ_ANYTHING, READ_ANYTHING, 0, 0, 0, 0)
        if ctypes.CDLL(None).capset(header, kept) != 0:
            raise OSError("the right to read could not be kept")
    return True


def _readable_by(user: int, paths: tuple[str, ...]) -> bool:
    try:
        os.setegid(user)
        os.seteuid(user)
        for path in paths:
            os.close(os.open(path, os.O_RDONLY))
    except PermissionError:
        return False
    finally:
        os.seteuid(0)
        os.setegid(0)
    return True


def _system_call(number: int, *args: bytes | int | None) -> int:
    made = [
        ctypes.c_char_p(arg) if isinstance(arg, bytes) else arg if arg is None else ctypes.c_long(arg) for arg in args
    ]
    return ctypes.CDLL(None).syscall(ctypes.c_long(number), *made)
