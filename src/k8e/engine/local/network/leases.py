"""The wires of this machine that are in use, and by which engine: a daemon, the doctor and tests live side by side.

The file system is the ledger. A link that exists is a lease, what it points to says whose: making one is atomic, and it
is never half written. All below /run, which a restart of the machine empties together with the wires themselves, in a
folder for each network namespace: what is shared there is interfaces and addresses, not processes or files.

    block-7     -> TAG 10.203.0.224/27 ...      an engine has the wires of this block, and uses these networks
    wire-115    -> TAG SANDBOX                  one of them is a sandbox's
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from ipaddress import ip_network
from pathlib import Path

from k8e.engine import EngineError
from k8e.engine.local.network.addresses import BLOCK, MAX_WIRES, Network, Pool, overlap

LEDGERS = Path("/run/k8e-network")


def own_ledger() -> Path:
    return LEDGERS / str(os.stat("/proc/thread-self/ns/net").st_ino)


class Leases:
    """One engine's view of the ledger. Blocks for a moment at most."""

    def __init__(self, tag: str, pool: Pool, ledger: Path, most: int = MAX_WIRES) -> None:
        """`most`: the wires that there can be on the machine, of all engines together."""
        self._tag = tag
        self._most = most
        self._pool = pool
        self._ledger = ledger

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """For leases that have to be read and changed together."""
        descriptor = self._take_lock()
        try:
            yield
        finally:
            os.close(descriptor)

    def _take_lock(self) -> int:
        while True:
            # Parts may be missing or there, in any order: the last engine may be removing them just now.
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                self._ledger.mkdir(mode=0o700, parents=True, exist_ok=True)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                descriptor = os.open(self._ledger / "lock", flags, 0o600)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                    # The engine that had it before may have been the last one, and removed the file.
                    if os.path.samestat(os.fstat(descriptor), os.stat(self._ledger / "lock")):
                        return descriptor
                except BaseException:
                    os.close(descriptor)
                    raise
                os.close(descriptor)

    def _links(self, prefix: str) -> Iterator[tuple[int, str, str]]:
        """Number, tag of the engine, and the rest of the text."""
        start = f"{self._ledger}/{prefix}"
        for number in self._numbers(prefix):
            try:
                tag, _, rest = os.readlink(f"{start}{number}").partition(" ")
            except FileNotFoundError:
                continue
            yield number, tag, rest

    def _numbers(self, prefix: str) -> list[int]:
        try:
            names = os.listdir(self._ledger)
        except FileNotFoundError:
            return []
        numbers = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
        return [int(number) for number in numbers if number.isdecimal()]

    def blocks(self) -> list[int]:
        """Ours."""
        return sorted(number for number, tag, _ in self._links("block-") if tag == self._tag)

    def wires(self) -> dict[int, str]:
        """Ours, with their sandboxes."""
        return {number: sandbox for number, tag, sandbox in self._links("wire-") if tag == self._tag}

    def any_engine(self) -> bool:
        """Whether any engine has any wires."""
        return any(True for _ in self._links("block-"))

    def lease_block(self, known: Iterable[Network]) -> int:
        """A free one that overlaps no network which the machine knows already."""
        with self.locked():
            taken = {number: rest for number, _, rest in self._links("block-")}
            others = [ip_network(text) for rest in taken.values() for text in rest.split()]
            others += known
            for number in range(min(self._pool.blocks, self._most // BLOCK)):
                networks = self._pool.block_networks(number)
                if number not in taken and not overlap(networks, others):
                    words = " ".join(map(str, networks))
                    os.symlink(f"{self._tag} {words}", self._ledger / f"block-{number}")
                    return number
        if self._most // BLOCK < self._pool.blocks:
            raise EngineError(
                "network connections",
                f"the machine's table of connections has room for {self._most} sandboxes, and that is taken",
                "raise net.netfilter.nf_conntrack_max (sysctl) and start the daemon again, or set another pool4 under "
                "[egress] in k8e.toml if the machine has routes into it",
            )
        raise EngineError(
            "network pool",
            f"no addresses are left in {self._pool.v4}: they are in use, or the machine has routes there",
            "set another pool4 (and pool6) under [egress] in k8e.toml",
        )

    def take_wire(self, sandbox: str) -> int | None:
        """A free one of our blocks."""
        taken = set(self._numbers("wire-"))
        for block in self.blocks():
            for number in range(block * BLOCK, (block + 1) * BLOCK):
                if number not in taken:
                    with contextlib.suppress(FileExistsError):
                        os.symlink(f"{self._tag} {sandbox}", self._ledger / f"wire-{number}")
                        return number
        return None

    def wires_of(self, sandbox: str) -> list[int]:
        return [number for number, owner in self.wires().items() if owner == sandbox]

    def release_wire(self, number: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._ledger / f"wire-{number}")

    def release_blocks(self, when_last: Callable[[], None]) -> bool:
        """Unless a sandbox still has a wire. `when_last` is called when no engine has any block left."""
        with self.locked():
            if self.wires():
                return False
            for number in self.blocks():
                os.unlink(self._ledger / f"block-{number}")
            if not self.any_engine():
                when_last()
                os.unlink(self._ledger / "lock")
                with contextlib.suppress(OSError):  # another engine is about to make a new lock there
                    os.rmdir(self._ledger)
        return True
