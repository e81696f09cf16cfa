"""The register of API keys, in one small file. It stores the public half of each key.

A revoked key stays on record, so that a client that still uses it is told why it is refused.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from k8e.damage import read_own
from k8e.identity.authority import replace_file

MAX_KEYS: Final = 10_000
_REVOKED_KEPT: Final = 1000


@dataclass(frozen=True, slots=True)
class KeyRecord:
    name: str
    key_id: str  # hexadecimal
    public: str  # hexadecimal, Ed25519
    scope: str
    tenants: tuple[str, ...]
    created: float
    expires: float | None  # None: never
    last_used: float = 0
    revoked: float | None = None

    def is_expired(self, now: float) -> bool:
        return self.expires is not None and now >= self.expires


class Register:
    """Keeps the keys in memory, and writes each change to the file before it returns. Methods may block; any thread may
    call them."""

    def __init__(self, path: Path, keep: Callable[[bytes], None] | None = None) -> None:
        """`keep` gets what the file will have, and keeps it elsewhere first, or raises OSError. Raises OSError or
        ValueError when the file cannot be used: then the gateway refuses all callers."""
        self._path = path
        self._keep = keep
        self._lock = threading.Lock()
        self._keys: dict[str, KeyRecord] = {}
        if os.path.lexists(path):
            for fields in json.loads(read_own(path))["keys"]:
                record = KeyRecord(**{**fields, "tenants": tuple(fields["tenants"])})
                self._keys[record.key_id] = record

    def find(self, key_id: str) -> KeyRecord | None:
        return self._keys.get(key_id)

    def living(self) -> list[KeyRecord]:
        """Returns the keys that are not revoked, oldest first, expired ones included."""
        return [record for record in list(self._keys.values()) if record.revoked is None]

    def named(self, name: str) -> KeyRecord | None:
        return next((record for record in self.living() if record.name == name), None)

    def add(self, record: KeyRecord) -> bool:
        """Adds a key; returns False when the name is taken."""
        with self._lock:
            if self.named(record.name) is not None:
                return False
            self._save({**self._keys, record.key_id: record})
            return True

    def revoke(self, key_id: str, now: float) -> None:
        with self._lock:
            self._save({**self._keys, key_id: replace(self._keys[key_id], revoked=now)})

    def touch(self, key_id: str, now: float) -> None:
        with self._lock:
            self._save({**self._keys, key_id: replace(self._keys[key_id], last_used=now)})

    def _save(self, keys: dict[str, KeyRecord]) -> None:
        revoked = sorted((record.revoked, key_id) for key_id, record in keys.items() if record.revoked is not None)
        for _, key_id in revoked[:-_REVOKED_KEPT]:
            del keys[key_id]
        content = json.dumps({"keys": [asdict(record) for record in keys.values()]}, indent=1).encode() + b"\n"
        if self._keep is not None:
            self._keep(content)
        replace_file(self._path, content, 0o600)
        self._keys = keys
