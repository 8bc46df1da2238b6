"""Runs a command with a systemd unit's limits of system calls, address families and memory.

    sandbox.py UNIT COMMAND …

It applies SystemCallFilter, RestrictAddressFamilies and MemoryDenyWriteExecute, as described in
systemd.exec(5); the groups of system calls are those of ``systemd-analyze syscall-filter``.
Settings that need systemd as process 1 are not applied.
"""

import ctypes
import errno
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from ctypes import c_int, c_uint, c_uint32, c_uint64
from pathlib import Path
from typing import Final

_ALLOW: Final = 0x7FFF0000
_REFUSE: Final = 0x00050000 | errno.EPERM
_EQUAL: Final = 4
_NO_NEW_PRIVILEGES: Final = 38
_NO_NEW_CODE: Final = 65
"""PR_SET_MDWE, since Linux 6.3."""


class _Argument(ctypes.Structure):
    """``struct scmp_arg_cmp``."""

    _fields_ = (("arg", c_uint), ("op", c_int), ("a", c_uint64), ("b", c_uint64))


def parse_settings(unit: Path) -> Mapping[str, list[str]]:
    """Return the settings of a unit in order."""
    settings: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", unit.read_text("utf-8"), re.MULTILINE):
        settings.setdefault(name, []).append(value)
    return settings


def load_syscall_groups() -> Mapping[str, list[str]]:
    """Return the system calls and subgroups of each group."""
    output = subprocess.run(
        ["systemd-analyze", "--no-pager", "syscall-filter"],  # noqa: S607 - the system's own
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    groups: dict[str, list[str]] = {}
    for name, body in re.findall(r"^(@[\w-]+)\n((?:[ ]+.*\n?)*)", output, re.MULTILINE):
        groups[name] = [one.strip() for one in body.splitlines() if not one.strip().startswith("#")]
    return groups


def expand_syscalls(names: list[str], groups: Mapping[str, list[str]]) -> Iterator[str]:
    """Replace groups by their system calls, recursively."""
    for name in names:
        if name.startswith("@"):
            yield from expand_syscalls(groups[name], groups)
        else:
            yield name


def resolve_allowed_syscalls(filters: list[str]) -> set[str]:
    """Return the allowed system calls; execve is always allowed."""
    groups = load_syscall_groups()
    left = set(expand_syscalls(["@default"], groups))
    for line in filters:
        called = set(expand_syscalls(line.removeprefix("~").split(), groups))
        left = left - called if line.startswith("~") else left | called
    return left


def confine(unit: Path) -> None:
    """Apply the unit's limits to this process and its successors. Raises OSError."""
    settings = parse_settings(unit)
    library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    library.seccomp_init.argtypes, library.seccomp_init.restype = [c_uint32], ctypes.c_void_p
    library.seccomp_load.argtypes = [ctypes.c_void_p]
    library.seccomp_rule_add_array.argtypes = [
        ctypes.c_void_p, c_uint32, c_int, c_uint, ctypes.c_void_p,
    ]  # fmt: skip
    context = library.seccomp_init(_REFUSE)
    for name in resolve_allowed_syscalls(settings["SystemCallFilter"]) - {"socket"}:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:
            _check(library.seccomp_rule_add_array(context, _ALLOW, number, 0, None))
    number = library.seccomp_syscall_resolve_name(b"socket")
    for family in settings["RestrictAddressFamilies"][0].split():
        argument = _Argument(0, _EQUAL, getattr(socket, family), 0)
        _check(library.seccomp_rule_add_array(context, _ALLOW, number, 1, ctypes.byref(argument)))
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    if settings["MemoryDenyWriteExecute"] == ["yes"]:
        _check(libc.prctl(_NO_NEW_CODE, 1, 0, 0, 0))
    _check(library.seccomp_load(context))


def _check(answer: int) -> None:
    if answer:
        raise OSError(ctypes.get_errno() or -answer, "the kernel or libseccomp will not have it")


if __name__ == "__main__":
    confine(Path(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - a program, and no shell
