"""Probes of runtimes: starts a sandbox with each, once, and remembers which work here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from k8e.engine import EngineError, Runtime, RuntimeReport
from k8e.engine.local.runtime.runtime import LocalRuntime
from k8e.engine.tasks import Once, cancel_and_wait

_STRENGTH = (Runtime.GVISOR, Runtime.NATIVE, Runtime.KATA, Runtime.FIRECRACKER)  # of those that exist
_QUICK = (Runtime.GVISOR, Runtime.NATIVE)  # to try; the others boot a machine
_INSTALL = {
    Runtime.GVISOR: "install runsc (Debian and Ubuntu: apt-get install runsc; Debian 12: from bookworm-backports)",
    Runtime.NATIVE: "install runc (Debian and Ubuntu: apt-get install runc)",
    Runtime.KATA: "without a /dev/kvm that works: emulation = true under [runtimes.kata] allows it, ten times slower",
}


class RuntimeProbes:
    def __init__(
        self,
        find: Callable[[Runtime], Awaitable[Sequence[LocalRuntime]]],
        attempt: Callable[[LocalRuntime], Awaitable[None]],
    ) -> None:
        """`find` lists the programs that could be a runtime, the best first, or raises EngineError when one cannot be
        had here. `attempt` raises EngineError when a sandbox of that runtime does not answer, or has no network."""
        self._find = find
        self._attempt = attempt
        self._reports: Once[Runtime, RuntimeReport] = Once()
        self._found: dict[Runtime, LocalRuntime] = {}
        self._slow: asyncio.Task[None] | None = None  # tries those that take long

    async def reports(self) -> Sequence[RuntimeReport]:
        return await asyncio.gather(*(self.report(runtime) for runtime in _STRENGTH))

    async def choose(self, wanted: Runtime | None) -> RuntimeReport:
        """As the engine's. What takes long is tried from the first time on, behind the callers, so that it is known
        when it is wanted."""
        order = _STRENGTH if wanted is None else (wanted,)
        await asyncio.gather(*(self.report(runtime) for runtime in order if runtime in _QUICK))
        if self._slow is None:
            self._slow = asyncio.create_task(self._try_slow())
        reports = [await self.report(order[0])]
        for runtime in order[1:]:
            if reports[-1].available:
                return reports[-1]
            reports.append(await self.report(runtime))
        return reports[-1] if reports[-1].available else reports[0]

    async def _try_slow(self) -> None:
        for runtime in _STRENGTH:
            with contextlib.suppress(EngineError, OSError):  # the next caller who wants it tries again, and is told
                await self.report(runtime)

    def found(self, runtime: Runtime) -> LocalRuntime:
        """Returns the program of a runtime that is available."""
        return self._found[runtime]

    async def require(self, runtime: Runtime) -> tuple[LocalRuntime, RuntimeReport]:
        report = await self.report(runtime)
        if not report.available:
            raise EngineError(f"runtime {runtime.value}", report.reason, report.hint)
        return self._found[runtime], report

    async def report(self, runtime: Runtime) -> RuntimeReport:
        return await self._reports.get(runtime, lambda: self._examine(runtime))

    async def _examine(self, runtime: Runtime) -> RuntimeReport:
        failures: list[str] = []
        try:
            candidates = await self._find(runtime)
        except EngineError as error:
            return RuntimeReport(runtime, False, reason=error.cause, hint=error.hint)
        for candidate in candidates:
            causes: list[str] = []
            for variant in candidate.variants():
                try:
                    await self._attempt(variant)
                except EngineError as error:
                    causes.append(f"{variant.flags[-1]}: {error.cause}" if variant.flags else error.cause)
                    continue
                self._found[runtime] = variant
                notes = [variant.note] if variant.note else []
                notes += [*causes, *failures]
                version = await candidate.version()
                return RuntimeReport(runtime, True, version, notes=tuple(notes), emulated=variant.emulated)
            failures.append(f"{candidate.binary} does not work: {'; '.join(causes)}")
        hint = _INSTALL.get(runtime, "")
        return RuntimeReport(runtime, False, reason="; ".join(failures) or "not installed", hint=hint)

    async def close(self) -> None:
        """Gives up what is still being tried; the next caller would try it anew."""
        if self._slow is not None:
            await cancel_and_wait(self._slow)
            self._slow = None
        await self._reports.close()
