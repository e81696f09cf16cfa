"""The errors of this package, all explained.

ClusterError          a cluster cannot be stopped
 +- BuildFailed       a component cannot be built
 +- StartFailed       a cluster does not start
"""

from __future__ import annotations

from k8e.errors import ExplainedError


class ClusterError(ExplainedError):
    """A cluster cannot be built, started or stopped."""


class BuildFailed(ClusterError):
    """A component cannot be built: no Go, no module, or the compiler refuses."""


class StartFailed(ClusterError):
    """A cluster does not start; nothing of it is left."""
