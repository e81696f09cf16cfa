"""Probes of runtimes: starts a sandbox with each, once, and remembers which work here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from k8e.engine import EngineError, Runtime, RuntimeReport
from k8e.engine.local.runtime.runtime import OciRuntime, find_runtimes
from k8e.engine.local.system.tasks import Once

_STRENGTH = (Runtime.GVISOR, Runtime.NATIVE, Runtime.KATA, Runtime.FIRECRACKER)  # of those that exist
_INSTALL = {
    Runtime.GVISOR: "install runsc (Debian and Ubuntu: apt-get install runsc; Debian 12: from bookworm-backports)",
    Runtime.NATIVE: "install runc (Debian and Ubuntu: apt-get install runc)",
    Runtime.KATA: "kata does not exist here yet: use gvisor or native",
    Runtime.FIRECRACKER: "firecracker does not exist here yet: use gvisor or native",
}


class RuntimeProbes:
    def __init__(self, attempt: Callable[[OciRuntime], Awaitable[None]]) -> None:
        """`attempt` raises EngineError when a sandbox of that runtime does not answer, or has no network."""
        self._attempt = attempt
        self._reports: Once[Runtime, RuntimeReport] = Once()
        self._found: dict[Runtime, OciRuntime] = {}

    async def reports(self) -> Sequence[RuntimeReport]:
        return await asyncio.gather(*(self.report(runtime) for runtime in _STRENGTH))

    def found(self, runtime: Runtime) -> OciRuntime:
        """Returns the program of a runtime that is available."""
        return self._found[runtime]

    async def require(self, runtime: Runtime) -> tuple[OciRuntime, RuntimeReport]:
        report = await self.report(runtime)
        if not report.available:
            raise EngineError(f"runtime {runtime.value}", report.reason, report.hint)
        return self._found[runtime], report

    async def report(self, runtime: Runtime) -> RuntimeReport:
        return await self._reports.get(runtime, lambda: self._examine(runtime))

    async def _examine(self, runtime: Runtime) -> RuntimeReport:
        failures: list[str] = []
        for candidate in await find_runtimes(runtime):
            causes: list[str] = []
            for variant in candidate.variants():
                try:
                    await self._attempt(variant)
                except EngineError as error:
                    causes.append(f"{variant.flags[-1]}: {error.cause}" if variant.flags else error.cause)
                    continue
                self._found[runtime] = variant
                notes = [variant.note] if variant.note else []
                return RuntimeReport(runtime, True, await candidate.version(), notes=(*notes, *causes, *failures))
            failures.append(f"{candidate.binary} does not work: {'; '.join(causes)}")
        missing = "not installed" if runtime in (Runtime.GVISOR, Runtime.NATIVE) else "not supported yet"
        return RuntimeReport(runtime, False, reason="; ".join(failures) or missing, hint=_INSTALL[runtime])

    async def close(self) -> None:
        """Gives up what is still being tried; the next caller would try it anew."""
        await self._reports.close()
