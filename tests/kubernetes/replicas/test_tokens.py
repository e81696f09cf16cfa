"""Programs of the cluster call a real gateway with real tokens of their service accounts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import sandbox_client
from k8e.core.access.accounts import Accounts
from k8e.core.clock import SystemClock
from k8e.core.errors import Fault, Kind
from k8e.engine.kubernetes.api import Api
from k8e.replicas.token_reviews import ServerReviews
from k8e.settings.accounts import ACCOUNTS
from tests.core.rig import fault
from tests.kubernetes.engine.rig import ROOT, Site, rename
from tests.kubernetes.kubectl import make_pod
from tests.kubernetes.replicas.test_two_gateways import K8E, Gateway
from tests.sdk.conftest import TYPESCRIPT, built

__all__ = ["built"]

TOKENS = f"{ROOT}/deploy/kubernetes/tokens.yaml"
needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="no npm here")


def allow_reviews(site: Site) -> Iterator[None]:
    namespace = site.kubectl.namespace
    names = {"k8e": namespace, "k8e-gateway-tokens": f"{namespace}-tokens"}
    try:
        site.kubectl.apply(*(rename(one, names) for one in yaml.safe_load_all(Path(TOKENS).read_text())))
        yield
    finally:
        for kind in ("clusterrolebinding", "clusterrole"):
            site.kubectl("delete", kind, f"{namespace}-tokens", "--ignore-not-found")


class Program:
    """A client that has a token in a file, and the gateway's CA."""

    def __init__(self, gateway: Gateway, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.file = folder / "token"
        self.env = {
            **{name: os.environ[name] for name in ("PATH",)},
            "HOME": str(folder),
            "K8E_RUN_DIR": str(folder / "nowhere"),
            "K8E_STATE_DIR": str(folder / "nowhere"),
            "K8E_SANDBOX_ENDPOINT": f"127.0.0.1:{gateway.port}",
            "K8E_SANDBOX_TOKEN_FILE": str(self.file),
            "K8E_SANDBOX_CERT": str(gateway.folder / "s/identity/ca.crt"),
        }

    def take(self, token: str) -> None:
        """As the kubelet does it: a new file in the old one's place."""
        draft = self.file.with_name("draft")
        draft.write_text(token + "\n")
        draft.replace(self.file)

    def call(self, *words: str) -> Any:
        done = subprocess.run([K8E, *words], env=self.env, capture_output=True, timeout=60)
        return json.loads(done.stdout or done.stderr)

    def refused(self, token: str) -> tuple[str, str]:
        self.take(token)
        answer = self.call("sandbox", "status")
        assert answer["hint"], answer
        return answer["code"], answer["detail"]


class Cast:
    def __init__(self, site: Site, gateway: Gateway) -> None:
        self.site = site
        self.gateway = gateway

    def account(self, name: str) -> str:
        self.site.kubectl("create", "serviceaccount", name)
        return name

    def token(self, account: str, audience: str = "k8e") -> str:
        return self.site.kubectl("create", "token", account, f"--audience={audience}", "--duration=10m").strip()


@pytest.fixture(scope="module")
def cast(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cast]:
    gateway = Gateway(site, tmp_path_factory.mktemp("tokens") / "g")
    config = Path(gateway.env["K8E_CONFIG"])
    namespace = site.kubectl.namespace
    rules = [
        {"account": f"{namespace}/builder", "tenants": ["ci"]},
        {"account": f"{namespace}/boss", "tenants": ["ci", "cd"], "scope": "operator"},
        {"account": f"{namespace}/gone", "tenants": ["ci"]},
        {"account": f"{namespace}/podded", "tenants": ["pods"]},
    ]
    lines = (
        "[[kubernetes.accounts]]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in rule.items())
        for rule in rules
    )
    config.write_text(config.read_text() + "\n" + "".join(lines))
    with contextlib.contextmanager(allow_reviews)(site):
        gateway.start()
        try:
            gateway.wait_until_open()
            cast = Cast(site, gateway)
            for name in ("builder", "boss", "gone", "stranger", "podded"):
                cast.account(name)
            yield cast
        finally:
            gateway.stop()


@pytest.fixture
def program(cast: Cast, tmp_path: Path) -> Program:
    return Program(cast.gateway, tmp_path / "program")


def test_an_account_works_with_its_tenants_sessions(cast: Cast, program: Program) -> None:
    program.take(cast.token("builder"))
    caller = program.call("sandbox", "status")["caller"]
    who = f"account:{cast.site.kubectl.namespace}/builder"
    assert (caller["name"], caller["tenant_id"], caller["scope"]) == (who, "ci", "run")
    session = program.call("sandbox", "create", "--runtime", "native")["session_id"]
    run = program.call("sandbox", "run", "--session-id", session, "echo by token")
    assert run["stdout"] == "by token\n", run
    refused = program.call("sandbox-apikey", "list")
    assert refused["code"] == "scope_missing"
    program.take(cast.token("boss"))  # renewed in its file
    assert [each["session_id"] for each in program.call("sandbox", "sessions")["sessions"]] == [session]
    assert program.call("sandbox", "destroy", session)["ok"]
    events = [json.loads(line) for line in (cast.gateway.folder / "s/audit.log").read_text().splitlines()]
    assert who in {event.get("caller") for event in events}


def test_what_is_not_good_is_refused_with_the_reason(cast: Cast, program: Program) -> None:
    code, detail = program.refused(cast.token("builder", "elsewhere"))
    assert (code, "elsewhere" in detail) == ("token_refused", True)
    good = cast.token("builder")
    head, _, signature = good.rpartition(".")
    forged = f"{head}.{'A' * len(signature)}"
    assert program.refused(forged)[0] == "token_refused"
    gone = cast.token("gone")
    cast.site.kubectl("delete", "serviceaccount", "gone")
    code, detail = program.refused(gone)
    assert (code, "not found" in detail) == ("token_refused", True), detail
    code, detail = program.refused(cast.token("stranger"))
    assert (code, f"{cast.site.kubectl.namespace}/stranger" in detail) == ("account_not_mapped", True)
    assert program.refused("k8e_AAAA")[0] == "token_refused"
    program.take(good)
    assert program.call("sandbox", "status")["caller"]["tenant_id"] == "ci"
    state = cast.gateway.folder / "s"
    refusals = (state / "audit-refusals.log").read_text()
    assert "token_refused" in refusals
    assert signature not in refusals + cast.gateway.read_log() + (state / "audit.log").read_text()


async def test_a_token_that_the_kubelet_gave_to_a_pod_ends_with_the_pod(
    cast: Cast, program: Program, make_reviews: Any
) -> None:
    kubectl = cast.site.kubectl
    pod = make_pod("holder", "native", "sleep 1000")
    source = {"serviceAccountToken": {"audience": "k8e", "expirationSeconds": 600, "path": "token"}}
    pod["spec"]["serviceAccountName"] = "podded"
    pod["spec"]["volumes"].append({"name": "token", "projected": {"sources": [source]}})
    main = pod["spec"]["containers"][0]
    main["volumeMounts"].append({"name": "token", "mountPath": "/var/run/secrets/k8e", "readOnly": True})
    secure = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "runAsUser": 1000}
    main["securityContext"] = {**secure, "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    kubectl.apply(pod)
    kubectl("wait", "--for=condition=Ready", "pod/holder", "--timeout=60s")
    token = kubectl("exec", "holder", "--", "cat", "/var/run/secrets/k8e/token")
    program.take(token)
    assert program.call("sandbox", "status")["caller"]["tenant_id"] == "pods"
    kubectl("delete", "pod", "holder", "--grace-period=0", "--force", "--wait=true")
    reviews = make_reviews()
    try:
        async with asyncio.timeout(60):
            while (await reviews.review(token.strip())).name:  # the server believes it for a moment, too
                await asyncio.sleep(0.1)
    finally:
        await reviews.close()


def test_both_sdks_read_the_file_again(cast: Cast, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("K8E_")]:
        monkeypatch.delenv(name)
    for name, value in program.env.items():
        monkeypatch.setenv(name, value)
    program.take(cast.token("builder"))
    with sandbox_client.SandboxClient() as client:
        first = client.status()
        program.take(cast.token("boss"))
        second = client.status()
        assert [each.name.rpartition("/")[2] for each in (first, second)] == ["builder", "boss"]
        program.file.unlink()
        with pytest.raises(sandbox_client.InvalidArgument) as caught:
            client.status()
        assert (caught.value.code, bool(caught.value.hint)) == ("token_unreadable", True)


SCRIPT = """
import { once } from "node:events";
import { SandboxClient } from "k8e-sandbox-client";
const client = new SandboxClient();
console.log((await client.status()).name);
await once(process.stdin, "data");
console.log((await client.status()).name);
await client.close();
process.exit(0);
"""


@needs_npm
@pytest.mark.usefixtures("built")
def test_typescript_too(cast: Cast, program: Program, tmp_path: Path) -> None:
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "k8e-sandbox-client").symlink_to(TYPESCRIPT)
    program.take(cast.token("builder"))
    command = ["node", "--input-type=module", "-e", SCRIPT]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=program.env, **pipes) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        program.take(cast.token("boss"))
        second, _ = process.communicate("go\n", timeout=60)
    assert [each.strip().rpartition("/")[2] for each in (first, second)] == ["builder", "boss"]


class LateClock(SystemClock):
    late = 0.0

    def wall(self) -> float:
        return time.time() + self.late


@pytest.fixture
def make_reviews(site: Site) -> Any:
    def make(kubeconfig: Path | None = None) -> ServerReviews:
        return ServerReviews(Api(site.kubectl.namespace, kubeconfig or site.kubeconfig), "k8e")

    return make


async def test_a_token_is_good_until_its_own_end(cast: Cast, make_reviews: Any) -> None:
    namespace, clock = cast.site.kubectl.namespace, LateClock()
    found = Accounts(ACCOUNTS.read([{"account": f"{namespace}/*", "tenants": ["ci"]}]), make_reviews(), clock)
    try:
        token = cast.token("builder")
        admission = await found.admit(token)
        assert admission.identity == f"k8e:account:{namespace}:builder"
        assert 0 < admission.expires - time.time() <= 600
        clock.late = 601.0
        with fault(Kind.UNAUTHENTICATED, "token_expired"):  # though the answer is still remembered
            await found.admit(token)
    finally:
        await found.close()


async def test_an_api_server_that_is_away_refuses(cast: Cast, make_reviews: Any, tmp_path: Path) -> None:
    config = yaml.safe_load(cast.site.kubeconfig.read_text())
    cluster = config["clusters"][0]["cluster"]
    cluster["server"] = cluster["server"].rpartition(":")[0] + ":1"  # nothing listens there
    away = tmp_path / "kubeconfig"
    away.write_text(yaml.safe_dump(config))
    rules = ACCOUNTS.read([{"account": f"{cast.site.kubectl.namespace}/*", "tenants": ["ci"]}])
    found = Accounts(rules, make_reviews(away))
    try:
        with fault(Kind.UNAVAILABLE, "review_unavailable"):
            await found.admit(cast.token("builder"))
    finally:
        await found.close()


async def test_a_gateway_that_may_not_ask_says_what_it_needs(cast: Cast, make_reviews: Any, tmp_path: Path) -> None:
    """With the rights of another account."""
    config = yaml.safe_load(cast.site.kubeconfig.read_text())
    config["users"][0]["user"]["token"] = cast.site.kubectl("create", "token", "stranger").strip()
    poor = tmp_path / "kubeconfig"
    poor.write_text(yaml.safe_dump(config))
    reviews = make_reviews(poor)
    try:
        with pytest.raises(Fault) as caught:
            await reviews.review(cast.token("builder"))
    finally:
        await reviews.close()
    assert (caught.value.code, "tokens.yaml" in caught.value.hint) == ("review_unavailable", True)
