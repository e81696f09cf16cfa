"""When a detected image cannot be had: the machine's own tools, if they have the command. Said in one line.

An image that somebody asked for is never replaced: what runs must be what was meant. Pure.
"""

from __future__ import annotations

from k8e.profiles.effective import HOST_IMAGE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from k8e.profiles.effective import Cage

# The host image shows the machine's /usr and nothing else of it (docs/local-engine.md).
FOLDERS = ("/usr/local/bin", "/usr/bin", "/usr/sbin")

# What to do where there is neither.
NOT_HERE = "this machine's own tools do not have the command either; an image that is asked for is tried again"


def fall_back(cage: Cage, cause: str, is_program: Callable[[str], bool]) -> tuple[Cage, str] | None:
    """The cage to use instead and the line to say, or None: then the failure stands. `cause` is why the image cannot be
    had; `is_program` tells of a path on the machine."""
    if not cage.detected or not can_replace(cage.image, cage.needs, is_program):
        return None
    changed = cage.but(image=HOST_IMAGE, image_by="fallback", image_reason=f"instead of {cage.image}")
    return changed, describe_fallback(cage.image, cause)


def can_replace(image: str, needs: Iterable[str], is_program: Callable[[str], bool]) -> bool:
    return image != HOST_IMAGE and all(has_program(word, is_program) for word in needs)


def describe_fallback(image: str, cause: str) -> str:
    return f"{image} cannot be had ({cause}): using this machine's own tools"


def has_program(word: str, is_program: Callable[[str], bool]) -> bool:
    if word.startswith("/"):
        return word.startswith(FOLDERS) and is_program(word)
    if "/" in word:
        return True  # a script of the project: it is there or not, whatever the image
    return any(is_program(f"{folder}/{word}") for folder in FOLDERS)
