"""The error of this package."""

from __future__ import annotations

from k8e.errors import ExplainedError


class ProfileError(ExplainedError):
    """An option, a profile or agentkernel.toml asks for something that cannot be."""
