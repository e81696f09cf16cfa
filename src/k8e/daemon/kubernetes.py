"""Makes the Kubernetes engine from the administrator's settings, and says what is missing; examines the cluster."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from k8e.daemon.paths import Paths, StartRefused

if TYPE_CHECKING:
    from k8e.core.access.accounts import Accounts
    from k8e.engine import Engine
    from k8e.engine.kubernetes import ClusterOptions
    from k8e.engine.report import Report
    from k8e.settings import KubernetesSettings


def make_engine(paths: Paths, settings: KubernetesSettings) -> Engine:
    from k8e.engine import EngineError

    options = read_options(settings)
    if not paths.gateway_key.exists() and paths.database.exists():
        raise StartRefused(
            "engine_unusable",
            f"the sessions of {paths.state_dir} are on this machine",
            hint="`k8e server`, or let K8E_STATE_DIR name another directory",
        )
    from k8e.engine.kubernetes import KubernetesEngine, TenantEngine

    paths.prepare()
    _silence()
    try:
        if settings.peers:
            name_secret(settings)  # they share their identity
        fetch_identity(settings, paths.gateway_key, paths.identity if settings.peers else None)
        kind = TenantEngine if settings.tenant_namespaces else KubernetesEngine
        return kind(options, paths.gateway_key, find_kubeconfig(settings))
    except EngineError as error:
        raise StartRefused("engine_unusable", str(error), hint=error.hint or "docs/kubernetes.md") from error


def examine(paths: Paths, settings: KubernetesSettings) -> Report:
    """Examines the cluster with the gateway's own key where there is one, so that nothing new stays in the cluster;
    else with one that is thrown away."""
    options = read_options(settings)
    from k8e.engine.kubernetes.doctor.doctor import examine_cluster

    _silence()
    kubeconfig = find_kubeconfig(settings)
    with tempfile.TemporaryDirectory(prefix="k8e-doctor-") as folder:
        lasting = bool(settings.key_secret) or paths.gateway_key.exists()
        key = paths.gateway_key if paths.gateway_key.exists() else Path(folder, "gateway.pem")
        fetch_identity(settings, key)
        return asyncio.run(examine_cluster(options, key, kubeconfig, lasting=lasting, several=bool(settings.peers)))


def fetch_identity(settings: KubernetesSettings, key: Path, identity: Path | None = None) -> None:
    """Copies the key of the Secret that the settings name to the file; `identity`: also the CA, to this folder."""
    if not settings.key_secret:
        return
    from k8e.engine.kubernetes import Api, SharedSecret, share_key

    namespace, name = name_secret(settings)

    async def fetch() -> None:
        api = Api(namespace, find_kubeconfig(settings))
        try:
            secret = SharedSecret(api, name)
            await share_key(secret, key)
            if identity is not None:
                from k8e.replicas.identity import share_authority

                await share_authority(secret, identity)
        finally:
            await api.close()

    asyncio.run(fetch())


def name_secret(settings: KubernetesSettings) -> tuple[str, str]:
    """The namespace and the name of the Secret with the gateway's identity."""
    namespace, _, name = settings.key_secret.partition("/")
    if not namespace or not name:
        raise StartRefused(
            "engine_unusable",
            f"[kubernetes] key_secret: {settings.key_secret!r} does not name a Secret",
            hint='such as key_secret = "k8e/gateway-key": a namespace and a name',
        )
    return namespace, name


def read_options(settings: KubernetesSettings) -> ClusterOptions:
    from k8e.engine import Runtime

    _require(settings)
    try:
        from k8e.engine.kubernetes import ClusterOptions
    except ModuleNotFoundError as error:
        raise StartRefused(
            "engine_unusable",
            "the libraries for Kubernetes are not installed",
            detail=str(error),
            hint="pip install 'k8e[kubernetes]'",
        ) from error
    return ClusterOptions(
        namespace=settings.namespace,
        image=settings.image,
        agent_image=settings.agent_image,
        egress=settings.egress or "",
        nameservers=tuple(map(str, settings.nameservers)),
        classes=MappingProxyType(
            {Runtime.GVISOR: settings.gvisor, Runtime.NATIVE: settings.native, Runtime.KATA: settings.kata}
        ),
        images=settings.images,
        claims=settings.claims,
        storage_class=settings.storage_class,
        pull_policy=settings.pull_policy or "",
        requests=settings.requests,
        user_namespaces=settings.user_namespaces,
        life=settings.life,
        deadline=settings.deadline,
    )


def find_kubeconfig(settings: KubernetesSettings) -> Path | None:
    return Path(settings.kubeconfig) if settings.kubeconfig else None


def _silence() -> None:
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # else every request is a line of the daemon's log


def make_accounts(settings: KubernetesSettings) -> Accounts:
    """The cluster's service accounts, whose tokens are taken; without any in the settings all are refused."""
    from k8e.core.access.accounts import Accounts
    from k8e.engine.kubernetes.api import Api
    from k8e.replicas.token_reviews import ServerReviews

    kubeconfig = Path(settings.kubeconfig) if settings.kubeconfig else None
    reviews = ServerReviews(Api(settings.namespace, kubeconfig), settings.token_audience)
    return Accounts(settings.accounts, reviews)


def _require(settings: KubernetesSettings) -> None:
    given = {
        "namespace": settings.namespace,
        "image": settings.image,
        "agent_image": settings.agent_image,
        "egress": settings.egress,
    }
    if missing := [name for name, value in given.items() if not value]:
        raise StartRefused(
            "engine_unusable",
            f"[kubernetes] {', '.join(missing)}: not set",
            hint="docs/kubernetes.md says what each is for; there is no value that is right for every cluster",
        )
