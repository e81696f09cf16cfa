"""The record of what an installation has changed besides its own files: `k8e uninstall` takes it back."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from k8e.cli.install.places import RECORD
from k8e.cli.process import Failure


@dataclass(frozen=True, slots=True)
class Record:
    source: str = ""  # the environment that the program was copied from
    made_group: bool = False  # there was none before
    packages: tuple[str, ...] = ()  # that were not there before

    @classmethod
    def read(cls, path: Path = RECORD) -> Self:
        try:
            fields = json.loads(path.read_text())
            return cls(str(fields["source"]), bool(fields["made_group"]), tuple(map(str, fields["packages"])))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, LookupError, TypeError) as error:
            hint = f"move {path} away, and run `k8e doctor --fix`; what it had noted stays on the machine"
            raise Failure("install_damaged", f"{path} cannot be read", detail=str(error), hint=hint) from error

    def note(self, **changes: object) -> Record:
        """Written before what it says is done: after a crash it may say too much, and never too little."""
        changed = dataclasses.replace(self, **changes)  # type: ignore[arg-type]
        if changed != self or not RECORD.exists():
            write_file(RECORD, json.dumps(dataclasses.asdict(changed), indent=1).encode() + b"\n")
        return changed


def write_file(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replaces it as a whole."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.chmod(mode)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
