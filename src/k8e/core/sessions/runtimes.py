"""Which runtimes work on this machine, and which one a session has."""

from __future__ import annotations

from collections.abc import Sequence

from k8e.core.errors import Fault, Kind
from k8e.core.parts import Parts
from k8e.core.translation import translated
from k8e.engine import Runtime, RuntimeReport


async def probe_runtimes(parts: Parts) -> Sequence[RuntimeReport]:
    with translated("trying the runtimes"):
        return await parts.engine.probe()


async def choose_runtime(parts: Parts, wanted: Runtime | None) -> Runtime:
    reports = await probe_runtimes(parts)
    for report in reports:
        if report.available and wanted in (None, report.runtime):
            return report.runtime
        if report.runtime is wanted:
            error = f"runtime {wanted.value} does not work here"
            raise Fault(Kind.UNAVAILABLE, "runtime_unavailable", error, detail=report.reason, hint=report.hint)
    if wanted is not None:
        raise Fault(Kind.UNAVAILABLE, "runtime_unavailable", f"runtime {wanted.value} is not known here")
    reasons = "; ".join(f"{report.runtime.value}: {report.reason}" for report in reports)
    hint = next((report.hint for report in reports if report.hint), "")
    raise Fault(Kind.UNAVAILABLE, "no_runtime", "no runtime works here", detail=reasons, hint=hint)
