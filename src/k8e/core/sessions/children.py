"""A sub-agent's session: the child of another one, whose workspace it shares and with which it ends.

It is a session of its own besides, with processes, limits, a network and an interpreter of its own. What it may do is a
subset of what its parent may: who is refused here is told what was too much. Later the parent's list of hosts may
become narrower, and the child's with it (hosts.py); nothing else of either can change.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, fields, replace
from typing import Final

from k8e.core import checks
from k8e.core.errors import Fault, Kind
from k8e.core.model import WORKSPACE, Caller, ChildSpec, Phase, Session
from k8e.core.parts import Parts
from k8e.core.pool.pool import Pool
from k8e.core.sessions.creation import Creation, choose_runtime, make_id, make_sandbox_name
from k8e.core.sessions.ends import describe_unusable
from k8e.core.sessions.live import Live
from k8e.core.sessions.quotas import Quotas
from k8e.core.sessions.sessions import Sessions
from k8e.core.store.records import SessionRecord
from k8e.engine import Limits, Runtime, Shape
from k8e.policy import HostList, excess
from k8e.profiles.text import describe_amount

STRENGTH: Final = (Runtime.NATIVE, Runtime.GVISOR, Runtime.KATA, Runtime.FIRECRACKER)  # the weakest first
AGENT_TYPE: Final = "agent_type"  # the label that says what kind of agent a child is for
_LESS: Final = "Ask for less, or leave it out: a child has at most what its parent has."
_SHOWN: Final = 10  # entries of a list, in an error


def beyond(field: str, error: str, *, detail: str = "", hint: str = _LESS) -> Fault:
    return Fault(Kind.DENIED, "beyond_parent", error, detail=detail, hint=hint, field=field)


# What it may have, as arithmetic


def check_runtime(parent: Runtime, wanted: Runtime | None) -> Runtime:
    if wanted is None:
        return parent
    if STRENGTH.index(wanted) < STRENGTH.index(parent):
        order = ", ".join(runtime.value for runtime in STRENGTH)
        error = f"runtime {wanted.value} isolates less than its parent's, {parent.value}"
        raise beyond("runtime", error, hint=f"From the weakest to the strongest: {order}.")
    return wanted


def choose_limits(parent: Limits, spec: ChildSpec) -> Limits:
    known = {each.name for each in fields(Limits)}
    for name in spec.limits:
        if name not in known:
            checks.refuse(f"limits.{name[:64]}", "is not known here")
    limits = replace(parent, **spec.limits)  # type: ignore[arg-type]
    checks.check_limits(limits)
    for name in known:
        if getattr(limits, name) > getattr(parent, name):
            wanted, theirs = (describe_amount(name, getattr(each, name)) for each in (limits, parent))
            error = f"{name} would be {wanted}, and its parent's is {theirs}"
            raise beyond(f"limits.{name}", error, hint="Ask for as much as its parent has, or less.")
    return limits


def choose_hosts(parent: Session, spec: ChildSpec) -> HostList:
    if spec.allowed_hosts is None:
        return parent.hosts
    hosts = checks.check_hosts("allowed_hosts", spec.allowed_hosts)
    check_reach("allowed_hosts", hosts, parent)
    return hosts


def check_reach(field: str, hosts: HostList, parent: Session) -> None:
    over = [str(entry) for entry in excess(hosts, parent.hosts)]
    if over:
        some, more = ",".join(over[:_SHOWN]), ",..." if len(over) > _SHOWN else ""
        raise beyond(
            field,
            f"its parent {parent.session_id} may not reach {some}{more}",
            detail=f"its parent may reach: {', '.join(parent.hosts.texts[:_SHOWN]) or 'nothing'}",
            hint=f"Leave it out, or open it for the parent: k8e sandbox allow-hosts {parent.session_id} --add {some}",
        )


def choose_shape(parent: Shape, spec: ChildSpec) -> Shape:
    for name in ("read_only", "powerless"):
        if getattr(spec, name) is False and getattr(parent, name):
            raise beyond(name, f"its parent is {name}, and so is every child of it", hint=f"Leave {name} out.")
    shape = replace(parent, powerless=parent.powerless or bool(spec.powerless))
    if spec.read_only and not parent.read_only:
        shape = replace(shape, read_only=True, mounts=tuple(replace(mount, writable=False) for mount in parent.mounts))
    return shape


def choose_ttl(parent: Session, spec: ChildSpec) -> float:
    if spec.ttl is None:
        return parent.ttl
    checks.check_ttl(spec.ttl)
    if spec.ttl > parent.ttl and not parent.persistent:
        raise beyond("ttl", f"ttl would be {spec.ttl:g} seconds, and its parent's is {parent.ttl:g}")
    return spec.ttl


def choose_workdir(spec: ChildSpec) -> str:
    """A directory of the workspace, by its absolute path; empty: the workspace itself."""
    if not spec.workspace_path:
        return ""
    field = "workspace_path"
    path = checks.check_path(field, spec.workspace_path)
    if b".." in path.split(b"/"):
        checks.refuse(field, "has '..' in it", "Give a directory of the workspace: /workspace/part, or part.")
    path = b"/" + posixpath.normpath(path).lstrip(b"/")
    if path != WORKSPACE and not path.startswith(WORKSPACE + b"/"):
        checks.refuse(field, "is not in /workspace, which is all that a child shares with its parent")
    try:
        return path.decode()
    except UnicodeDecodeError:
        checks.refuse(field, "is not UTF-8")


@dataclass(frozen=True, slots=True, eq=False)
class Children:
    _parts: Parts
    _sessions: Sessions
    _creation: Creation
    _pool: Pool
    _quotas: Quotas

    async def create(self, caller: Caller, parent_session_id: str, spec: ChildSpec) -> Session:
        began = self._parts.clock.monotonic()
        checks.check_name("parent_session_id", parent_session_id)
        parent = self._sessions.find(caller, parent_session_id)
        if spec.session_id:
            checks.check_name("session_id", spec.session_id)
        if spec.agent_type:
            checks.check_name("agent_type", spec.agent_type)
        if spec.image:
            checks.check_image(spec.image)
        env = checks.check_env("env", spec.env)
        self._check_parent(parent)
        digest = parent.record.digest
        if spec.image:
            digest = await self._creation.resolve_image(parent.session.owner, parent.session.tenant, spec.image)
        if spec.runtime is not None:
            await choose_runtime(self._parts, check_runtime(parent.session.runtime, spec.runtime))
        # From here to where it is registered nothing is waited for: a parent that ends, or may reach less, knows it.
        self._check_parent(parent)
        clock = self._parts.clock
        session = derive(parent.session, spec, clock.wall())
        checks.check_memory(session.runtime, session.limits)
        record = SessionRecord(make_sandbox_name(), session, clock.boot, clock.monotonic(), digest=digest)
        child = Live(replace(record, parent_sandbox=parent.sandbox), clock, env, parent)
        self._creation.register(child)
        child.touch()
        with self._pool.foreground():
            await self._creation.bring_up(child, caller)
        self._creation.log_created(child, caller, began)
        return child.show()

    def _check_parent(self, parent: Live) -> None:
        if parent.parent is not None:
            raise Fault(
                Kind.DENIED,
                "child_of_child",
                f"session {parent.session_id} is a child itself, and children have no children",
                detail=f"its parent is {parent.parent.session_id}",
                hint=f"Make it a child of {parent.parent.session_id}.",
                field="parent_session_id",
            )
        if not parent.usable:
            raise describe_unusable(parent)
        self._quotas.check_child(parent)


def derive(parent: Session, spec: ChildSpec, now: float) -> Session:
    """The child that is asked for, as far as its parent allows it."""
    return Session(
        session_id=spec.session_id or make_id(),
        tenant=parent.tenant,
        owner=parent.owner,
        phase=Phase.CREATING,
        runtime=check_runtime(parent.runtime, spec.runtime),
        image=spec.image or parent.image,
        limits=choose_limits(parent.limits, spec),
        env_keys=tuple(sorted(spec.env)),
        created=now,
        last_used=now,
        ttl=choose_ttl(parent, spec),
        hosts=choose_hosts(parent, spec),
        parent=parent.session_id,
        shape=choose_shape(parent.shape, spec),
        labels={AGENT_TYPE: spec.agent_type} if spec.agent_type else {},
        workdir=choose_workdir(spec),
    )
