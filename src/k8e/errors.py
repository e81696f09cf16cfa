"""The explained error: what every error of ours tells its reader, in one shape. It imports nothing.

ExplainedError        code, error, detail, hint
 +- Fault             core refuses or fails (k8e.core.errors); doors translate its kind
 +- HttpRefusal       an HTTP request never reaches core (k8e.doors.http.errors)
 +- GrpcRefusal       a gRPC call never reaches core (k8e.doors.grpc.errors)
 +- StartRefused      the daemon does not start (k8e.daemon.paths)
 +- SettingsError     k8e.toml cannot be used (k8e.settings.file)
 +- ProfileError      an option or agentkernel.toml is wrong (k8e.profiles.errors)
 +- ClusterError      a cluster of ours cannot be built, started or stopped (k8e.cluster.errors)
 +- Failure           the command line ends with this error (k8e.cli.process)
"""

from __future__ import annotations


class ExplainedError(Exception):
    """`code` is snake_case and never changes once released; `error` is for people, `detail` is the cause, and `hint` is
    the next step that works: every error has one."""

    def __init__(self, code: str, error: str, *, detail: str = "", hint: str) -> None:
        self.code = code
        self.error = error
        self.detail = detail
        self.hint = hint
        super().__init__(f"{code}: {error}" + (f" ({detail})" if detail else ""))

    @property
    def body(self) -> dict[str, str]:
        """The JSON object that every door answers."""
        return {"error": self.error, "detail": self.detail, "code": self.code, "hint": self.hint}
