"""Replaces a detected image that cannot be fetched by the machine's own tools, if they have the command. Pure.

An image that the user named is never replaced.
"""

from __future__ import annotations

from k8e.profiles.sandbox_policy import HOST_IMAGE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from k8e.profiles.sandbox_policy import SandboxPolicy

# The host image shows the machine's /usr and nothing else of it (docs/local-engine.md).
FOLDERS = ("/usr/local/bin", "/usr/bin", "/usr/sbin")

# The hint when the machine does not have the command either.
NOT_HERE = "this machine's own tools do not have the command either; an image that is asked for is tried again"


def fall_back(policy: SandboxPolicy, cause: str, is_program: Callable[[str], bool]) -> tuple[SandboxPolicy, str] | None:
    """Returns the policy to use instead and the line to print, or None when the failure stands. `cause` is why the
    image cannot be fetched; `is_program` tells whether a path of the machine is a program."""
    if not policy.detected or not can_replace(policy.image, policy.needs, is_program):
        return None
    changed = policy.but(image=HOST_IMAGE, image_by="fallback", image_reason=f"instead of {policy.image}")
    return changed, describe_fallback(policy.image, cause)


def can_replace(image: str, needs: Iterable[str], is_program: Callable[[str], bool]) -> bool:
    return image != HOST_IMAGE and all(has_program(word, is_program) for word in needs)


def describe_fallback(image: str, cause: str) -> str:
    return f"{image} cannot be had ({cause}): using this machine's own tools"


def has_program(word: str, is_program: Callable[[str], bool]) -> bool:
    if word.startswith("/"):
        return word.startswith(FOLDERS) and is_program(word)
    if "/" in word:
        return True  # a script of the project does not depend on the image
    return any(is_program(f"{folder}/{word}") for folder in FOLDERS)
