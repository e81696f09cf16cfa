"""The sections of k8e.toml, each with its keys, their defaults and what is allowed."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network

from k8e.policy import Address, HostList
from k8e.settings.accounts import ACCOUNTS, AUDIENCE, AccountRule
from k8e.settings.values import (
    ADDRESS,
    FLAG,
    HOSTS,
    IMAGES,
    LISTEN,
    NAMES,
    OBJECT,
    POOL4,
    POOL6,
    TEXT,
    choice,
    count,
    key,
    many,
    number,
    optional,
    size,
    span,
)


@dataclass(frozen=True, slots=True)
class EgressSettings:
    """The network of sandboxes."""

    pool4: IPv4Network = key("10.203.0.0/16", POOL4)
    pool6: IPv6Network = key("fd6b:3865:6e65::/48", POOL6)
    nameservers: tuple[Address, ...] = key([], many(ADDRESS, "addresses", 8))
    allowed_hosts: HostList | None = key(None, optional(HOSTS))
    gateway_hosts: HostList = key(["*"], HOSTS)


@dataclass(frozen=True, slots=True)
class LimitsSettings:
    """The defaults of a session."""

    cpus: float = key(1.0, number(0.01, 1024))
    memory: int = key("1g", size("16m", "16t"))
    pids: int = key(512, count(8, 1 << 22))
    disk: int = key("2g", size("1m", "1024t"))
    ttl: float = key("1h", span("1s", "30d"))


@dataclass(frozen=True, slots=True)
class QuotasSettings:
    """The quotas of one payer; 0 is no limit. Where `cpus`, `memory` and `disk` are left out there is no limit, but a
    tenant of the gateway gets a share of the machine when a door listens beyond loopback (core/access/quotas.py)."""

    sessions: int = key(256, count(0, 1_000_000))
    children: int = key(16, count(0, 1_000_000))
    cpus: float | None = key(None, optional(number(0, 1_000_000)))
    memory: int | None = key(None, optional(size("0", "1024t")))
    disk: int | None = key(None, optional(size("0", "1024t")))
    creates_per_minute: int = key(0, count(0, 1_000_000))
    concurrent_runs: int = key(0, count(0, 1_000_000))
    images: int = key(256, count(0, 1_000_000))
    image_bytes: int = key("64g", size("0", "1024t"))
    request_bytes: int = key("512m", size("66m", "16t"))


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Warm sandboxes."""

    enabled: bool = key(True, FLAG)
    min: int = key(1, count(0, 1000))
    max: int = key(8, count(0, 1000))
    free_memory: float = key(0.2, number(0, 1))
    prewarm: bool = key(False, FLAG)


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """The gRPC door for other machines."""

    listen: str = key("127.0.0.1:50051", LISTEN)
    names: tuple[str, ...] = key([], NAMES)
    metrics: str = key("", LISTEN)
    mcp: str = key("", LISTEN)


@dataclass(frozen=True, slots=True)
class AuditSettings:
    """The audit log and the refusal log."""

    required: bool = key(False, FLAG)
    code: bool = key(False, FLAG)
    size: int = key("16m", size("64k", "16g"))
    files: int = key(8, count(1, 1000))


@dataclass(frozen=True, slots=True)
class ApprovalsSettings:
    """Approvals: who may answer, and for how long."""

    same_user: bool = key(False, FLAG)
    life: float = key("1h", span("1s", "1d"))


@dataclass(frozen=True, slots=True)
class ImagesSettings:
    """Limits on unpacking images."""

    layer_bytes: int = key("16g", size("1m", "16t"))
    layer_entries: int = key(2_000_000, count(1, 100_000_000))
    ratio: int = key(400, count(10, 1_000_000))


@dataclass(frozen=True, slots=True)
class KataSettings:
    """The runtime `kata`. In the file: [runtimes.kata]."""

    emulation: bool = key(False, FLAG)


@dataclass(frozen=True, slots=True)
class KubernetesSettings:
    """The engine `kubernetes` (`k8e server --engine kubernetes`)."""

    namespace: str = key("k8e", OBJECT)
    kubeconfig: str = key("", TEXT)
    image: str = key("", TEXT)
    images: tuple[str, ...] = key([], IMAGES)
    agent_image: str = key("", TEXT)
    key_secret: str = key("", TEXT)
    egress: str | None = key(None, optional(choice("policy", "node", "cilium", "open")))
    nameservers: tuple[Address, ...] = key([], many(ADDRESS, "addresses", 3))
    gvisor: str = key("gvisor", OBJECT)
    native: str = key("", OBJECT)
    kata: str = key("kata", OBJECT)
    claims: bool = key(True, FLAG)
    storage_class: str = key("", OBJECT)
    pull_policy: str | None = key(None, optional(choice("Always", "IfNotPresent", "Never")))
    requests: float = key(1.0, number(0.01, 1))
    user_namespaces: bool = key(True, FLAG)
    life: float = key("1d", span("1m", "365d"))
    deadline: float = key("2m", span("5s", "1h"))
    peers: str = key("", LISTEN)
    mcp_peers: str = key("", LISTEN)
    token_audience: str = key("k8e", AUDIENCE)
    accounts: tuple[AccountRule, ...] = key([], ACCOUNTS)
    tenant_namespaces: bool = key(False, FLAG)


@dataclass(frozen=True, slots=True)
class Settings:
    """A `_` in a section's name is a dot in the file."""

    egress: EgressSettings = EgressSettings()
    limits: LimitsSettings = LimitsSettings()
    quotas: QuotasSettings = QuotasSettings()
    gateway: GatewaySettings = GatewaySettings()
    pool: PoolSettings = PoolSettings()
    audit: AuditSettings = AuditSettings()
    approvals: ApprovalsSettings = ApprovalsSettings()
    images: ImagesSettings = ImagesSettings()
    runtimes_kata: KataSettings = KataSettings()
    kubernetes: KubernetesSettings = KubernetesSettings()
