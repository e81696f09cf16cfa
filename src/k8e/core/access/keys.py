"""API keys and certificates: who may have them, and which caller a certificate stands for at this moment.

A key that is revoked or has expired takes its certificates with it: doors ask here at every call, and are told at once
(`watch`). Loading the cryptography takes a while, so it is loaded when the first caller needs it.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k8e.core import checks
from k8e.core.access.access import local_caller, require_scope
from k8e.core.clock import Clock, SystemClock
from k8e.core.errors import Fault, Kind
from k8e.core.log.audit import Audit
from k8e.core.log.daemon_log import note
from k8e.core.model import REMOTE, Caller, Scope
from k8e.core.tasks import wait_result
from k8e.damage import Damage

if TYPE_CHECKING:
    from k8e.core.access.accounts import Accounts
    from k8e.identity.authority import Authority
    from k8e.identity.register import KeyRecord, Register

DEFAULT_TTL: Final = 30 * 86_400.0
MAX_TTL: Final = 10 * 365 * 86_400.0
CLIENT_LIFE: Final = 90 * 86_400.0  # of a certificate, at most
LOCAL_LIFE: Final = 86_400.0  # of a local user's
_KEY_SCHEME: Final = "k8e:key:"  # how identities in certificates begin
_USER_SCHEME: Final = "k8e:uid:"
ACCOUNT_SCHEME: Final = "k8e:account:"  # of tokens: no certificate has it
_KEY_PREFIX: Final = "k8e_"
_MAX_TENANTS: Final = 64
_MINUTE: Final = 60.0
_HINT: Final = "Log in again with a key that is good: k8e connect."
_AT_SOCKET: Final = (
    "Log in again at the unix socket of the daemon, which the command line and the SDKs do by themselves; "
    "a user who may not use it joins the group k8e, or uses an API key."
)


@dataclass(frozen=True, slots=True)
class KeySpec:
    name: str
    ttl: float | None = DEFAULT_TTL  # None: for ever
    scope: Scope = Scope.RUN
    tenants: tuple[str, ...] = ()  # none: default


@dataclass(frozen=True, slots=True)
class Certificate:
    certificate: str  # PEM
    authority: str  # PEM
    expires: float
    caller: Caller


@dataclass(frozen=True, slots=True)
class Admission:
    """An authenticated caller, and until when."""

    caller: Caller
    identity: str
    expires: float

    @property
    def ended(self) -> Fault:
        """Tells a caller whose time is over during a call."""
        if self.identity.startswith(ACCOUNT_SCHEME):
            return token_expired()
        error = "the certificate has expired"
        return Fault(Kind.UNAUTHENTICATED, "certificate_expired", error, hint="Log in again, and call again.")


class Keys:
    def __init__(
        self,
        directory: Path,
        clock: Clock | None = None,
        audit: Audit | None = None,
        keep: Callable[[bytes], None] | None = None,
        accounts: Accounts | None = None,
    ) -> None:
        """`keep`: where the register is kept, if not in the directory alone (`identity.register`). `accounts`: of the
        cluster, whose tokens are taken too."""
        self._directory = directory
        self._accounts = accounts
        self._keep = keep
        self._audit = audit
        self._clock = clock or SystemClock()
        self._opening = asyncio.Lock()
        self._opened: tuple[Authority, Register] | None = None
        self._watchers: list[Callable[[str], None]] = []
        self._told = False  # that it is damaged

    def watch(self, callback: Callable[[str], None]) -> None:
        """`callback` is called with an identity when its key is deleted."""
        self._watchers.append(callback)

    @property
    def authority_file(self) -> Path:
        """The CA's certificate, which every user may read."""
        return self._directory / "ca.crt"

    @property
    def in_use(self) -> bool:
        """Whether there are keys."""
        return (self._directory / "keys.json").exists()

    async def open(self) -> tuple[Authority, Register]:
        async with self._opening:
            if self._opened is None:
                try:
                    self._opened = await asyncio.to_thread(self._load)
                except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
                    if self._audit is not None and not self._told:
                        self._told = True
                        self._audit.note_damages([Damage(str(self._directory), str(error), "")])
                    raise _unavailable(error) from error
            return self._opened

    def _load(self) -> tuple[Authority, Register]:
        from k8e.identity.authority import Authority
        from k8e.identity.register import Register

        return Authority.open(self._directory, self._clock.wall()), Register(self._directory / "keys.json", self._keep)

    # Keys

    async def create(self, caller: Caller, spec: KeySpec) -> tuple[KeyRecord, str]:
        """The record of the key, and the key itself."""
        from k8e.identity.api_key import ApiKey
        from k8e.identity.register import MAX_KEYS, KeyRecord

        require_scope(caller, Scope.ADMIN)
        _check_spec(spec)
        authority, register = await self.open()
        if len(register.living()) >= MAX_KEYS:
            raise Fault(Kind.EXHAUSTED, "too_many_keys", f"there are {MAX_KEYS} keys already", hint="Delete some.")
        now = self._clock.wall()
        key = ApiKey.generate(authority.fingerprint)
        record = KeyRecord(
            name=spec.name,
            key_id=key.key_id.hex(),
            public=key.public.hex(),
            scope=spec.scope.value,
            tenants=spec.tenants or ("default",),
            created=now,
            expires=None if spec.ttl is None else now + spec.ttl,
        )
        if not await self._write(register.add, record):
            hint = "Delete it first, or choose another name."
            raise Fault(Kind.CONFLICT, "key_exists", f"there is a key {spec.name} already", hint=hint, field="name")
        facts = {"key": spec.name, "key_id": record.key_id, "scope": record.scope, "tenants": record.tenants}
        self._note("key_created", **facts, caller=caller.label)
        return record, key.text

    async def list(self, caller: Caller) -> Sequence[KeyRecord]:
        require_scope(caller, Scope.ADMIN)
        return (await self.open())[1].living()

    async def delete(self, caller: Caller, name: str) -> None:
        """When this returns, the key and its certificates are refused, also on connections that are open."""
        require_scope(caller, Scope.ADMIN)
        _, register = await self.open()
        record = register.named(checks.check_name("name", name))
        if record is None:
            raise Fault(Kind.NOT_FOUND, "key_not_found", f"there is no key {name}", hint="k8e sandbox-apikey list")
        await self._write(register.revoke, record.key_id, self._clock.wall())
        for callback in self._watchers:
            callback(_KEY_SCHEME + record.key_id)
        self._note("key_deleted", key=name, key_id=record.key_id, caller=caller.label)

    # Certificates

    async def login(self, key_id: str, request: str, signature: bytes) -> Certificate:
        """A certificate for a caller who proves possession of the key."""
        from k8e.identity.api_key import state_login, verify_login

        authority, register = await self.open()
        content = _read_request(request)
        record = register.find(key_id)
        # An unknown key is verified like a known one: the answer does not tell which ids exist.
        public = bytes.fromhex(record.public) if record else authority.fingerprint
        statement = state_login(authority.fingerprint, bytes.fromhex(record.key_id) if record else bytes(8), content)
        if not verify_login(public, signature, statement) or record is None:
            error = "the key is not known here, or the proof that you have it is wrong"
            raise Fault(Kind.UNAUTHENTICATED, "key_refused", error, hint="Is it the whole key, and this gateway's?")
        certificate = await self._certify(_KEY_SCHEME + record.key_id, request)
        await self._write(register.touch, record.key_id, self._clock.wall())
        return certificate

    async def renew(self, identity: str, request: str) -> Certificate:
        """A new certificate for the holder of one that is still valid. A local user has to prove every day, at the unix
        socket, that the socket is still open to them."""
        await self.open()
        if identity.startswith(_USER_SCHEME):
            error = "the certificate of a local user is not renewed over the gateway"
            raise Fault(Kind.DENIED, "renewed_at_socket", error, hint=_AT_SOCKET)
        if identity.startswith(ACCOUNT_SCHEME):
            error = "a service account has no certificate"
            hint = "Send its token with every call."
            raise Fault(Kind.DENIED, "token_instead", error, hint=hint)
        _read_request(request)
        return await self._certify(identity, request)

    async def login_local(self, caller: Caller, request: str) -> Certificate:
        """A certificate for a user of this machine, whom the kernel has authenticated."""
        await self.open()
        _read_request(request)
        return await self._certify(f"{_USER_SCHEME}{caller.uid}", request)

    async def _certify(self, identity: str, request: str) -> Certificate:
        authority, _ = await self.open()
        now = self._clock.wall()
        caller, end = self._resolve(identity)
        expires = min(now + (CLIENT_LIFE if caller.uid == REMOTE else LOCAL_LIFE), end)
        issued = await asyncio.to_thread(authority.issue_client, request, identity, now, expires)
        self._note("certificate_issued", identity=identity, caller=caller.label, expires=expires)
        return Certificate(issued.decode(), authority.certificate.decode(), expires, caller)

    def admit(self, certificate: bytes) -> Admission:
        """The caller of a certificate (PEM) that TLS has verified. `open` must have been called."""
        if self._opened is None:
            raise _unavailable("it was not opened")
        peer = self._opened[0].identify(certificate)
        if peer is None:
            error = "this needs a certificate of this gateway"
            raise Fault(Kind.UNAUTHENTICATED, "not_logged_in", error, hint="Log in with an API key: k8e connect.")
        if self._clock.wall() >= peer.expires:
            hint = _AT_SOCKET if peer.identity.startswith(_USER_SCHEME) else _HINT
            raise Fault(Kind.UNAUTHENTICATED, "certificate_expired", "the certificate has expired", hint=hint)
        caller, end = self._resolve(peer.identity)
        return Admission(caller, peer.identity, min(peer.expires, end))

    async def admit_token(self, token: str, source: str = "") -> Admission:
        """The caller of a service account's token. `source`: where it comes from."""
        if self._accounts is None:
            hint = "Use an API key: k8e connect. Tokens are for `k8e server --engine kubernetes`."
            raise refuse_token("this gateway asks no cluster", hint)
        return await self._accounts.admit(token, source)

    async def admit_bearer(self, text: str, source: str = "") -> Admission:
        """The caller of an API key or a token that was sent as it is, over an encrypted connection."""
        from k8e.identity.api_key import ApiKey, BadKey

        if self._accounts is not None and not text.startswith(_KEY_PREFIX):
            return await self.admit_token(text, source)
        authority, register = await self.open()
        try:
            key = ApiKey.parse(text)
        except BadKey as bad:
            raise Fault(Kind.UNAUTHENTICATED, "bad_apikey", f"this {bad}", hint="It begins with k8e_.") from None
        record = register.find(key.key_id.hex())
        known = bytes.fromhex(record.public) if record else bytes(32)
        if not hmac.compare_digest(key.public, known) or key.fingerprint != authority.fingerprint or record is None:
            error = "the key is not known here"
            raise Fault(Kind.UNAUTHENTICATED, "key_refused", error, hint="Is it the whole key, and this gateway's?")
        identity = _KEY_SCHEME + record.key_id
        caller, expires = self._resolve(identity)
        now = self._clock.wall()
        if now - record.last_used > _MINUTE:  # it comes with every request
            await self._write(register.touch, record.key_id, now)
        return Admission(caller, identity, expires)

    def _resolve(self, identity: str) -> tuple[Caller, float]:
        """The caller of an identity, and until when."""
        assert self._opened is not None
        if identity.startswith(_USER_SCHEME):
            return local_caller(int(identity.removeprefix(_USER_SCHEME))), float("inf")
        record = self._opened[1].find(identity.removeprefix(_KEY_SCHEME))
        if record is None or record.revoked is not None:
            raise Fault(Kind.UNAUTHENTICATED, "key_revoked", "the key was revoked", hint=_HINT)
        if record.is_expired(self._clock.wall()):
            raise Fault(Kind.UNAUTHENTICATED, "key_expired", "the key has expired", hint=_HINT)
        tenant, *others = record.tenants
        caller = Caller(REMOTE, tenant, tuple(others), Scope(record.scope), record.name)
        return caller, float("inf") if record.expires is None else record.expires

    def _note(self, event: str, **fields: object) -> None:
        note(event, **fields)
        if self._audit is not None:
            self._audit.note(event, **fields)

    async def _write(self, work: Callable[..., bool | None], *values: object) -> bool | None:
        try:
            return await wait_result(asyncio.to_thread(work, *values))
        except OSError as error:
            raise _unavailable(error) from error


def refuse_token(cause: str, hint: str = "Is it the cluster's own, of an account that exists?") -> Fault:
    return Fault(Kind.UNAUTHENTICATED, "token_refused", "the token is not valid here", detail=cause[:400], hint=hint)


def token_expired() -> Fault:
    hint = "The kubelet renews a projected token in its file: read it anew for each call."
    return Fault(Kind.UNAUTHENTICATED, "token_expired", "the token has expired", hint=hint)


def _unavailable(cause: object) -> Fault:
    hint = "Is the disk with the state directory full, or was something in its folder identity changed?"
    error = "keys and certificates cannot be read or written"
    return Fault(Kind.UNAVAILABLE, "identity_unavailable", error, detail=str(cause), hint=hint)


def _read_request(request: str) -> bytes:
    from k8e.identity.authority import BadRequest, request_content

    try:
        return request_content(request)
    except BadRequest as error:
        checks.refuse("csr", str(error))


def _check_spec(spec: KeySpec) -> None:
    checks.check_name("name", spec.name)
    for tenant in spec.tenants:
        checks.check_name("tenant", tenant)
    if len(spec.tenants) > (_MAX_TENANTS if spec.scope is Scope.OPERATOR else 1):
        checks.refuse("tenant", "is given too often", "Only a key with the scope operator has several tenants.")
    if spec.ttl is not None:
        checks.check_number("ttl", spec.ttl, 1, MAX_TTL)
