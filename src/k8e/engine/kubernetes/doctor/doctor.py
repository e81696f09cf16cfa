"""Finds out what works on a cluster, by doing it: `k8e doctor --engine kubernetes`.

First what all sandboxes rest on: the API, the account's rights, what the namespace admits. Then for every runtime a
sandbox, in which the controls are tried that the cluster, and not the engine, has to enforce: its network above all.
The doctor has a key of its own, so that it meets no gateway's sandboxes, and removes what it made.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from lightkube.models.core_v1 import Container, PodSpec, SecurityContext
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Pod
from lightkube.resources.node_v1 import RuntimeClass

from k8e.engine import EngineError, Limits, Runtime, RuntimeReport, SandboxSpec
from k8e.engine.kubernetes.api import Api, ApiError, ApiRefused
from k8e.engine.kubernetes.doctor.rights import (
    NEEDED,
    NEEDED_BY_SEVERAL,
    NEEDED_WITH_CILIUM,
    TOO_MANY,
    Right,
    has_right,
)
from k8e.engine.kubernetes.doctor.subject import Subject
from k8e.engine.kubernetes.engine import KubernetesEngine
from k8e.engine.kubernetes.options import CILIUM, NODE, POLICY, ClusterOptions
from k8e.engine.report import Check, Examination, Report, Verdict
from k8e.link.errors import LinkError
from k8e.link.noise import AGENT_PORT

LIMITS: Final = Limits(cpus=0.5, memory=256 << 20, disk=64 << 20)
_DEADLINE: Final = 60.0  # of one check
_CLAIMS: Final = "/apis/extensions.agents.x-k8s.io/v1beta1"
_CILIUM: Final = "/apis/cilium.io/v2"
_TOKEN: Final = b"/var/run/secrets/kubernetes.io/serviceaccount/token"
_ROLES: Final = "the chart in deploy/helm, or deploy/kubernetes/gateway.yaml, has the roles"

_NETWORK: Final = (
    "use a network for the cluster that enforces NetworkPolicy (Cilium, Calico, kube-router, a cloud's own with its "
    "policies turned on); or, knowing what it means, set [kubernetes] egress to open"
)
_LISTS: Final = (
    "the helper of a node needs a network whose packets pass the kernel's own hooks (docs/kubernetes-egress.md says "
    'which do not); where it is Cilium, set [kubernetes] egress = "cilium"'
)


class Broken(Exception):
    """A control that was tried does not hold."""


class Untested(Exception):
    """It does not apply here."""


async def examine_cluster(
    options: ClusterOptions,
    key: Path,
    kubeconfig: Path | None = None,
    *,
    lasting: bool = False,
    several: bool = False,
) -> Report:
    """Examines with an engine of its own. Needs no daemon and disturbs none. `lasting`: the key is a gateway's, and the
    objects that its sandboxes share stay. `several`: the gateway is one of several."""
    began = time.monotonic()
    api = Api(options.namespace, kubeconfig)
    try:
        shared = [check async for check in _examine_shared(api, options, several=several)]
    finally:
        await api.close()
    if shared[0].verdict is Verdict.FAILED:  # the API does not answer: every further check would say so, too
        reason = RuntimeReport(Runtime.GVISOR, available=False, reason="the Kubernetes API does not answer")
        none = [Examination(replace(reason, runtime=runtime)) for runtime in Runtime]
        return Report(tuple(none), time.monotonic() - began, tuple(shared))
    engine = KubernetesEngine(options, key, kubeconfig)
    try:
        examinations = [await _examine_runtime(engine, options, runtime) for runtime in Runtime]
        if not lasting:
            shared += [check async for check in _clear(engine)]
    finally:
        await engine.close()
    return Report(tuple(examinations), time.monotonic() - began, tuple(shared))


async def _examine_shared(api: Api, options: ClusterOptions, *, several: bool) -> AsyncIterator[Check]:
    needed = (
        *NEEDED,
        *(NEEDED_BY_SEVERAL if several else ()),
        *(NEEDED_WITH_CILIUM if options.egress == CILIUM else ()),
    )
    yield await _try("API", "asked for its version", _ask_version(api))
    asked = f"asked for each of {len(needed)} (SelfSubjectAccessReview)"
    yield await _try("rights", asked, _ask_rights(api, needed), _ROLES)
    yield await _try("no further rights", f"asked for {len(TOO_MANY)} dangerous ones", _ask_more(api), _ROLES)
    label = f"kubectl label namespace {options.namespace} pod-security.kubernetes.io/enforce=restricted"
    yield await _try("pod security", "asked for a privileged pod (dry run)", _ask_privileged(api), label)
    yield await _try("RuntimeClasses", "listed them", _list_classes(api, options))
    yield await _try("agent-sandbox", "asked for its resources", _ask_claims(api))
    if options.egress == CILIUM:
        hint = 'install Cilium as the cluster\'s network, or set [kubernetes] egress = "node"'
        yield await _try("Cilium", "asked for its resources", _ask_cilium(api), hint)


async def _ask_version(api: Api) -> str:
    content = await api.fetch("/version")
    return f"Kubernetes {json.loads(content or b'{}').get('gitVersion', 'of unknown version')}"


async def _ask_rights(api: Api, needed: Sequence[Right]) -> str:
    missing = [str(right) for right in needed if not await has_right(api, right)]
    if missing:
        raise Broken(f"in {api.namespace} the account may not: {', '.join(missing)}")
    return "the account has all that are needed"


async def _ask_more(api: Api) -> str:
    found = [str(right) for right in TOO_MANY if await has_right(api, right)]
    if found:
        # No control of sandboxes: an administrator who tries things out has them all.
        raise Untested(f"the account has more than a gateway needs: {', '.join(found)}; use one of its own")
    return "the account cannot leave its namespace"


async def _ask_privileged(api: Api) -> str:
    container = Container(name="doctor", image="none", securityContext=SecurityContext(privileged=True))
    pod = Pod(
        metadata=ObjectMeta(name=f"k8e-doctor-{secrets.token_hex(4)}", namespace=api.namespace),
        spec=PodSpec(containers=[container], hostNetwork=True, hostPID=True),
    )
    try:
        await api.create(pod, dry_run=True)
    except ApiRefused as refused:
        if refused.code == 403 and "violates PodSecurity" in refused.cause:
            return "a privileged pod is refused by the namespace"
        raise
    raise Broken(f"{api.namespace} admits a privileged pod: an account that may make pods there has the nodes")


async def _list_classes(api: Api, options: ClusterOptions) -> str:
    there = {one.metadata.name for one in await api.list_global(RuntimeClass) if one.metadata is not None}
    told = []
    for runtime, name in options.classes.items():
        if not name:
            told.append(f"{runtime.value}: the cluster's own runtime")
        else:
            told.append(f"{runtime.value}: {name}{'' if name in there else ' (missing)'}")
    return "; ".join(told)


async def _ask_claims(api: Api) -> str:
    if await api.fetch(_CLAIMS) is None:
        raise Untested("its CRDs are not served: sandboxes are plain pods")
    return "its CRDs are served (v1beta1)"


async def _ask_cilium(api: Api) -> str:
    """Whether its agents run is tried with a sandbox: none is handed out whose list is not known to be in force."""
    if await api.fetch(_CILIUM) is None:
        raise Broken("the cluster does not serve CiliumNetworkPolicy (cilium.io/v2)")
    return "its CRDs are served (v2)"


# Runtimes -------------------------------------------------------------------------------------------------------------


async def _examine_runtime(engine: KubernetesEngine, options: ClusterOptions, runtime: Runtime) -> Examination:
    name = f"doctor-{runtime.value}-{secrets.token_hex(4)}"
    try:
        described = await engine.describe_runtime(runtime)
    except EngineError as error:
        return Examination(RuntimeReport(runtime, available=False, reason=error.cause, hint=error.hint))
    report = RuntimeReport(runtime, available=True, version=described)
    try:
        begin = time.monotonic()
        await engine.create(name, SandboxSpec(runtime, limits=LIMITS))
        started = time.monotonic() - begin
        subject = await _open(engine, name)
        checks = [
            Check("pod", Verdict.OK, "made one", f"runs, {started:.1f} s after it was asked for"),
            Check("way to pods", Verdict.OK, "spoke to its agent", f"reached {subject.address}, port {AGENT_PORT}"),
            await _try("command", "ran a program", _run_command(subject)),
            await _try("no account", "looked for a token of Kubernetes", _find_token(subject)),
        ]
        name_of_it, hint = ("list of hosts", _LISTS) if options.egress == NODE else ("network policy", _NETWORK)
        tried = "connected from one sandbox to another"
        checks.append(await _try(name_of_it, tried, _cross(engine, subject, options), hint))
    except EngineError as error:
        check = "way to pods" if error.control == "agent" else "pod"
        return Examination(report, (Check(check, Verdict.FAILED, "made a sandbox", error.cause, error.hint),))
    except LinkError as error:
        return Examination(report, (Check("way to pods", Verdict.FAILED, "spoke to its agent", str(error)),))
    finally:
        await _remove(engine, name)
    return Examination(report, tuple(checks))


async def _open(engine: KubernetesEngine, name: str) -> Subject:
    sandbox, place = await engine.attach(name)
    return Subject(name, sandbox, place, await engine.find_address(name))


async def _run_command(subject: Subject) -> str:
    word = secrets.token_hex(8)
    done = await subject.run("echo", word)
    if done.exit_code != 0 or done.stdout.strip() != word:
        raise Broken(f"echo ended with {done.exit_code} and said {done.stdout[:100]!r}")
    return "its output came back whole"


async def _find_token(subject: Subject) -> str:
    with contextlib.suppress(LinkError):
        await subject.sandbox.stat(_TOKEN)
        raise Broken("a sandbox has a token of the cluster")
    return "a sandbox has none"


async def _cross(engine: KubernetesEngine, subject: Subject, options: ClusterOptions) -> str:
    """With two pods: a sandbox under `policy`, or with an empty list under `cilium` and `node`, reaches nothing, not
    even what the gateway reaches; and the helper of its node has seen the attempt."""
    if options.egress not in (POLICY, CILIUM, NODE):
        raise Untested(f"[kubernetes] egress is {options.egress}: nothing is to be enforced")
    client = await subject.find_client()
    if client is None:
        raise Broken("could not be tried: the image has no program that connects (python3, bash, nc)")
    other = f"doctor-other-{secrets.token_hex(4)}"
    try:
        await engine.create(other, SandboxSpec(Runtime(subject.name.split("-")[1]), limits=LIMITS))
        address = await engine.find_address(other)
        await engine.observe(subject.name)  # what was refused before
        done = await subject.run(*client, address, str(AGENT_PORT))
        seen = await engine.observe(subject.name)
    finally:
        await _remove(engine, other)
    if options.egress != NODE:
        if done.exit_code == 0:
            raise Broken(f"a sandbox reached {address}: the cluster's network does not enforce its policy")
        return "a sandbox does not reach another, which the gateway reaches"
    if done.exit_code == 0:
        raise Broken(f"a sandbox with an empty list reached {address}: the helper's rules are not asked")
    if seen.refusals_unknown:
        raise Broken("the helper of the node does not say what it refused; does the gateway reach its port?")
    reasons = [each.reason for each in seen.refusals if each.address == address]
    if not reasons:
        raise Broken(f"a sandbox did not reach {address}, and it was not the helper that refused it")
    return f"a sandbox with an empty list does not reach another, and its node's helper says why: {reasons[0]}"


async def _clear(engine: KubernetesEngine) -> AsyncIterator[Check]:
    """Says what could not be removed: the gateway's account may make policies and not delete them."""
    try:
        await engine.remove_policy()
    except ApiError as error:
        tried = "removed the policies of the doctor's sandboxes"
        yield Check("clearing up", Verdict.SKIPPED, tried, f"{error.cause}; delete it by kubectl")


async def _remove(engine: KubernetesEngine, name: str) -> None:
    with contextlib.suppress(EngineError):  # its pod ends with its life
        await engine.destroy(name)


async def _try(name: str, tried: str, work: Awaitable[str], hint: str = "") -> Check:
    verdict = Verdict.FAILED
    try:
        async with asyncio.timeout(_DEADLINE):
            found = await work
        verdict = Verdict.OK
    except Untested as reason:
        verdict, found = Verdict.SKIPPED, str(reason)
    except Broken as fault:
        found = str(fault)
    except ApiError as error:
        found, hint = error.cause, error.hint or hint
    except TimeoutError:
        found = "could not be tried: no answer in time"
    except (EngineError, LinkError, OSError, ValueError) as error:
        found = f"could not be tried: {type(error).__name__}: {error}"
    return Check(name, verdict, tried, found, hint if verdict is Verdict.FAILED else "")
