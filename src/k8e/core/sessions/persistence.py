"""Stops a persistent session and starts it again.

A persistent session has three more phases than others. `stopping` and `starting` are on record before the step that
they announce, and the next daemon that finds one of them makes it `stopped`: the files are the same before, during and
after each. Both are the service's own tasks: a caller that leaves changes nothing about how they finish, and a second
caller waits for the first.

Commands are asked to end first, as a machine's init would ask; a command that does not end is killed with the sandbox.
A caller that waits for a command has its result, with the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from k8e.core import checks
from k8e.core.errors import Fault, Kind
from k8e.core.log.daemon_log import note, warn
from k8e.core.model import Caller, Phase, Session
from k8e.core.parts import Parts
from k8e.core.sandbox.environment import Variables, keep_env, prepare_state
from k8e.core.sessions.builder import Builder, describe_sandbox
from k8e.core.sessions.creation import find_runtime
from k8e.core.sessions.ends import STOPPED, describe_unusable
from k8e.core.sessions.interpreters import Interpreters
from k8e.core.sessions.lifecycle import Lifecycle
from k8e.core.sessions.live import Live
from k8e.core.sessions.phases import Event
from k8e.core.sessions.quotas import Quotas
from k8e.core.sessions.sessions import Sessions
from k8e.core.tasks import wait_done, wait_result
from k8e.core.translation import translated
from k8e.engine import EngineError
from k8e.link.errors import LinkError

PATIENCE: Final = 5.0  # for everything that was asked to end; longer than the time between TERM and KILL


@dataclass(frozen=True, slots=True, eq=False)
class Persistence:
    _parts: Parts
    _sessions: Sessions
    _lifecycle: Lifecycle
    _builder: Builder
    _end_runs: Callable[[Live], Awaitable[None]]
    _review_approvals: Callable[[], Awaitable[None]]
    _quotas: Quotas
    _interpreters: Interpreters

    # Stopping

    async def stop(self, caller: Caller, session_id: str) -> Session:
        live = self._sessions.find(caller, session_id)
        _check_persistent(live)
        await _let_finish(live, Phase.STARTING)
        if live.usable:
            self._lifecycle.halt(live, STOPPED, self._say_goodbye(live), by=caller.label)
        if live.phase is Phase.STOPPING:
            await wait_result(self._lifecycle.halt(live, STOPPED))
        if not live.stopped:
            raise describe_unusable(live)
        return live.show()

    async def _say_goodbye(self, live: Live) -> None:
        """Ends runs in good order. One that fails to end is killed with the sandbox, a moment later."""
        try:
            async with asyncio.timeout(PATIENCE):
                await self._review_approvals()
                await self._end_runs(live)
        except (Fault, LinkError, EngineError, TimeoutError) as error:
            warn("stopped_hard", session=live.session_id, sandbox=live.sandbox, cause=error)

    # Starting

    async def start(
        self, caller: Caller, session_id: str, env: Mapping[str, str], secrets: Mapping[str, str]
    ) -> Session:
        plain, secret = checks.check_env("env", env), checks.check_env("secrets", secrets)
        live = self._sessions.find(caller, session_id)
        _check_persistent(live)
        await _let_finish(live, Phase.STARTING, Phase.STOPPING)
        if live.usable:
            if plain or secret:
                hint = "Stop it first; or give variables to each run."
                raise Fault(Kind.CONFLICT, "session_active", f"session {session_id} runs already", hint=hint)
            return live.show()
        if not live.stopped:
            raise describe_unusable(live)
        _check_secrets(live, secrets)
        self._quotas.check_start(live)
        live.advance(Event.START_BEGUN)
        starting = self._lifecycle.begin(live, self._start(live, caller, plain, secret))
        await wait_done(starting)
        if live.ending is not None:
            raise Fault(
                Kind.CONFLICT,
                "session_destroyed",
                f"session {session_id} was destroyed meanwhile",
                hint="Create it again.",
            )
        starting.result()
        return live.show()

    async def _start(self, live: Live, caller: Caller, plain: Variables, secret: Variables) -> None:
        try:
            await self._bring_back(live, caller, plain, secret)
        except BaseException:
            if live.ending is None:
                await wait_done(self._lifecycle.halt(live, live.record.reason or STOPPED))
            raise

    async def _bring_back(self, live: Live, caller: Caller, plain: Variables, secret: Variables) -> None:
        record = live.record
        await self._review_approvals()  # approvals from before the stop are settled before a new one can be asked for
        await self._parts.store.set_phase(live.sandbox, Phase.STARTING, record.reason, durable=True)
        kept = tuple(dict((*await self._parts.environments.recall(live.sandbox), *plain)).items())  # later ones win
        _check_variables(live, kept)
        env = tuple(dict((*kept, *secret)).items())
        checks.check_size_of_env(env)
        if plain:
            await self._parts.environments.keep(live.sandbox, kept)
        runtime = await find_runtime(self._parts, live.session.runtime)
        async with self._builder.builds.take(live.payer):
            with translated("starting the sandbox"):
                await self._parts.engine.start(live.sandbox, describe_sandbox(record))
                sandbox, place = await self._parts.engine.attach(live.sandbox)
            await prepare_state(sandbox)
        await keep_env(sandbox, env)
        await self._parts.audit.record("session_started", **live.identity, caller=caller.label)
        names, secrets = _names(env), _names(secret)
        await self._parts.store.start_session(live.sandbox, names, secrets, emulated=runtime.emulated)
        if live.ending is None:
            live.revive(env, names, secrets, emulated=runtime.emulated)
            self._interpreters.begin(live, sandbox, place, warm=False)
            note("session_started", session=live.session_id, sandbox=live.sandbox)


def _names(env: Variables) -> tuple[str, ...]:
    return tuple(sorted(name.decode() for name, _ in env))


async def _let_finish(live: Live, *phases: Phase) -> None:
    """Waits for the step that is under way, whichever caller began it."""
    while live.phase in phases and live.step is not None and not live.step.done():
        await wait_done(live.step)


def _check_persistent(live: Live) -> None:
    if not live.session.persistent:
        raise Fault(
            Kind.CONFLICT,
            "session_not_persistent",
            f"session {live.session_id} cannot be stopped and started",
            detail="it is not a persistent session",
            hint="Destroy it, or create one with `persistent` (k8e sandbox create --persistent).",
        )


def _check_variables(live: Live, kept: Variables) -> None:
    """As with secrets: a command that runs without its variables would fail later and less clearly."""
    there = {name.decode() for name, _ in kept}
    missing = [name for name in live.session.env_keys if name not in there and name not in live.session.secret_keys]
    if missing:
        names = ", ".join(missing)
        raise Fault(
            Kind.INVALID,
            "variables_missing",
            f"the session's variables have to be given again: {names}",
            detail="what kept their values was damaged, or is not there",
            hint="k8e sandbox start takes --env NAME=VALUE; the daemon's log names what was damaged.",
            field="env",
        )


def _check_secrets(live: Live, given: Mapping[str, str]) -> None:
    missing = [name for name in live.session.secret_keys if name not in given]
    if missing:
        names = ", ".join(missing)
        raise Fault(
            Kind.INVALID,
            "secrets_missing",
            f"the session's secrets have to be given again: {names}",
            detail="their values are not kept on any disk",
            hint="k8e sandbox start takes --secret NAME, with the value in the variable of that name.",
            field="secrets",
        )
