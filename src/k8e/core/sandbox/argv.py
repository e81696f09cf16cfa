"""The argv of a run: the caller's own, that of a language, or that of `pip install`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from k8e.core.checks import encode, refuse
from k8e.core.model import Language, RunSpec

MAX_WORD: Final = (128 << 10) - 1  # MAX_ARG_STRLEN without the NUL: execve takes no longer argument
MAX_ARGV: Final = 1 << 20
MAX_PACKAGES: Final = 256

# `--`: bash takes what follows -c for another option when it begins with a dash. The others take it as it is.
COMMANDS: Final[Mapping[Language, tuple[bytes, ...]]] = {
    Language.BASH: (b"bash", b"-c", b"--"),
    Language.PYTHON: (b"python3", b"-c"),
    Language.NODE: (b"node", b"-e"),
    Language.TS: (b"tsx", b"-e"),
}


def check_argv(spec: RunSpec) -> tuple[bytes, ...]:
    """Empty: the image's own command."""
    if spec.argv and spec.code:
        refuse("argv", "is given together with code")
    if spec.entrypoint and spec.code:
        refuse("entrypoint", "is for argv, and code is given")
    if not spec.argv and spec.entrypoint:
        return ()  # the image's own
    if not spec.argv:
        code = encode("code", spec.code)
        if len(code) > MAX_WORD:
            hint = "Write it to a file in the workspace and run that."
            refuse("code", f"has {len(code)} bytes, the limit is {MAX_WORD}", hint)
        return (*COMMANDS[spec.language], code)
    if not spec.argv[0]:
        refuse("argv", "begins with an empty word")
    for index, word in enumerate(spec.argv):
        if b"\0" in word:
            refuse(f"argv[{index}]", "contains a NUL byte")
        if len(word) > MAX_WORD:
            refuse(f"argv[{index}]", f"has {len(word)} bytes, the limit is {MAX_WORD}")
    if sum(len(word) + 1 for word in spec.argv) > MAX_ARGV:
        refuse("argv", f"takes more than {MAX_ARGV} bytes")
    return spec.argv


def check_packages(packages: Sequence[str]) -> tuple[bytes, ...]:
    """The argv that installs the packages. A word that looks like an option is no requirement of pip."""
    if not packages:
        refuse("packages", "is empty")
    if len(packages) > MAX_PACKAGES:
        refuse("packages", f"has {len(packages)} entries, the limit is {MAX_PACKAGES}")
    words = []
    for index, package in enumerate(packages):
        word = encode(f"packages[{index}]", package)
        if not word.strip() or word.startswith(b"-"):
            refuse(f"packages[{index}]", "is not a requirement", "Name packages only, such as requests or requests>=2.")
        words.append(word)
    return (b"pip", b"install", b"--no-input", b"--disable-pip-version-check", b"--", *words)
