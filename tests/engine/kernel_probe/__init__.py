"""Runs inside a sandbox (`python3 -m kernel_probe`): tries everything that must not work there, each in a process of
its own, and prints what the kernel said as JSON, {name: {"errno": "EPERM"} | {"done": ...} | {"signal": 31}}.

Needs nothing but the standard library and has no idea of what is right: the test knows (test_kernel_surface.py). The
arguments are such that a kernel that allowed a call would do it, harmlessly. Imports are relative, because in there it
has no parent package.
"""

from __future__ import annotations

from . import files, mounts, namespaces, processes, ptrace, sockets, subsystems
from .calls import ATTEMPTS, NAMESPACES

__all__ = ["ATTEMPTS", "NAMESPACES", "files", "mounts", "namespaces", "processes", "ptrace", "sockets", "subsystems"]
