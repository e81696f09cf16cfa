"""Callers that prove who they are by a token of the cluster: its service accounts (docs/kubernetes-gateways.md).

The cluster says whose a token is, the settings what that account may do; an account that they do not name is refused.
What the cluster said is remembered for a moment, by the token's digest. When the cluster does not answer, callers whose
tokens are not remembered are refused, whatever else is known of them.
"""

from __future__ import annotations

import asyncio
import base64
import collections
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from k8e.core.access.access import Payer
from k8e.core.access.keys import ACCOUNT_SCHEME, Admission, refuse_token, token_expired
from k8e.core.access.turns import Turns
from k8e.core.clock import Clock, SystemClock
from k8e.core.errors import Fault, Kind
from k8e.core.model import REMOTE, Caller, Scope
from k8e.settings.accounts import AccountRule, find_rule

LIFE: Final = 30.0  # seconds for which it is remembered whose a token is
REFUSED_LIFE: Final = 5.0  # and that it is no good
KNOWN, REFUSED = 4096, 1024  # digests that are remembered of each kind
PATIENCE: Final = 10.0  # seconds for the cluster to answer
REVIEWS, REVIEWS_EACH = 32, 8  # at once; of one source
WAITING, WAITING_EACH = 512, 256  # calls that wait for them
_MOST: Final = 8 << 10  # characters of a token: metadata of a call has no more
_SOURCE: Final = -3  # of payers: callers that are not known yet, told apart by where they come from


@dataclass(frozen=True, slots=True)
class Verdict:
    """The cluster's word about a token. Without a name it is no good, and `cause` says why."""

    namespace: str = ""
    name: str = ""
    cause: str = ""


class TokenReviews(Protocol):
    audience: str

    async def close(self) -> None: ...

    async def review(self, token: str) -> Verdict:
        """Asks the cluster. Raises Fault (UNAVAILABLE) when it has no answer."""


@dataclass(frozen=True, slots=True)
class Claims:
    """A token's word about itself. It is believed once the cluster has verified it; until then it can only refuse."""

    expires: float
    audiences: tuple[str, ...]


class Accounts:
    def __init__(self, rules: Sequence[AccountRule], reviews: TokenReviews, clock: Clock | None = None) -> None:
        self._rules = rules
        self._reviews = reviews
        self._clock = clock or SystemClock()
        self._known = _Memory(KNOWN)
        self._refused = _Memory(REFUSED)
        self._asking: dict[bytes, asyncio.Task[Verdict]] = {}
        self._turns = Turns(REVIEWS, each=REVIEWS_EACH)
        self._waiting: collections.Counter[str] = collections.Counter()

    async def admit(self, token: str, source: str = "") -> Admission:
        """`source`: where the caller comes from. Raises Fault."""
        if not self._rules:
            raise not_mapped("none is")
        claims = read_claims(token)
        if self._reviews.audience not in claims.audiences:
            said = ", ".join(claims.audiences)[:200] or "none"
            hint = f"Mount a projected token with the audience {self._reviews.audience}."
            raise refuse_token(f"its audience is {said}, and not {self._reviews.audience}", hint)
        if self._clock.wall() >= claims.expires:
            raise token_expired()
        digest = hashlib.sha256(token.encode()).digest()
        now = self._clock.monotonic()
        verdict = self._known.find(digest, now) or self._refused.find(digest, now)
        if verdict is None:
            verdict = await self._ask(digest, token, source)
        if not verdict.name:
            raise refuse_token(verdict.cause)
        rule = find_rule(self._rules, verdict.namespace, verdict.name)
        if rule is None:
            raise not_mapped(f"{verdict.namespace}/{verdict.name} is not")
        tenant, *others = rule.tenants
        name = f"account:{verdict.namespace}/{verdict.name}"
        caller = Caller(REMOTE, tenant, tuple(others), Scope(rule.scope), name)
        return Admission(caller, f"{ACCOUNT_SCHEME}{verdict.namespace}:{verdict.name}", claims.expires)

    async def _ask(self, digest: bytes, token: str, source: str) -> Verdict:
        """Callers with the same token wait for the same answer."""
        if self._waiting.total() >= WAITING or self._waiting[source] >= WAITING_EACH:
            error = "too many callers wait for the cluster to check their tokens"
            raise Fault(Kind.EXHAUSTED, "too_many_calls", error, hint="Try again soon.", retry_after=1.0)
        self._waiting[source] += 1
        try:
            asking = self._asking.get(digest)
            if asking is None:
                asking = asyncio.create_task(self._review(digest, token, source))
                self._asking[digest] = asking
                asking.add_done_callback(lambda done: self._finish(digest, done))
            return await asyncio.shield(asking)
        finally:
            self._waiting[source] -= 1
            if not self._waiting[source]:
                del self._waiting[source]

    def _finish(self, digest: bytes, done: asyncio.Task[Verdict]) -> None:
        del self._asking[digest]
        if not done.cancelled():
            done.exception()  # its callers may all have left

    async def _review(self, digest: bytes, token: str, source: str) -> Verdict:
        try:
            async with asyncio.timeout(PATIENCE), self._turns.take(Payer(_SOURCE, source)):
                verdict = await self._reviews.review(token)
        except TimeoutError:
            raise review_unavailable(f"no answer in {PATIENCE:g} seconds") from None
        now = self._clock.monotonic()
        if verdict.name:
            self._known.add(digest, verdict, now + LIFE)
        else:
            self._refused.add(digest, verdict, now + REFUSED_LIFE)
        return verdict

    async def close(self) -> None:
        for task in list(self._asking.values()):
            task.cancel()
        if self._asking:
            await asyncio.wait(self._asking.values())
        await self._reviews.close()


class _Memory:
    """The last verdicts, each with its end."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._verdicts: dict[bytes, tuple[Verdict, float]] = {}

    def find(self, digest: bytes, now: float) -> Verdict | None:
        verdict, until = self._verdicts.get(digest, (None, 0.0))
        return verdict if now < until else None

    def add(self, digest: bytes, verdict: Verdict, until: float) -> None:
        self._verdicts.pop(digest, None)
        if len(self._verdicts) >= self._most:
            del self._verdicts[next(iter(self._verdicts))]  # the oldest: all live equally long
        self._verdicts[digest] = (verdict, until)


def read_claims(token: str) -> Claims:
    """Raises Fault for what is no token of a service account that ends."""
    parts = token.split(".")
    if len(token) > _MOST or len(parts) != 3 or not token.isascii():
        raise refuse_token("it is no JSON Web Token")
    try:
        payload: Any = json.loads(base64.b64decode(parts[1] + "=" * (-len(parts[1]) % 4), b"-_", validate=True))
    except (ValueError, RecursionError):
        raise refuse_token("it is no JSON Web Token") from None
    claims = payload if isinstance(payload, dict) else {}
    audiences, expires = claims.get("aud"), claims.get("exp")
    if isinstance(audiences, str):
        audiences = [audiences]
    if not isinstance(expires, int | float) or isinstance(expires, bool):
        raise refuse_token("it has no end")
    if not isinstance(audiences, list):
        audiences = []
    return Claims(float(expires), tuple(each for each in audiences if isinstance(each, str)))


def not_mapped(cause: str) -> Fault:
    error = "no settings name this service account"
    hint = "[kubernetes] accounts in the gateway's k8e.toml names the service accounts that may call."
    return Fault(Kind.UNAUTHENTICATED, "account_not_mapped", error, detail=cause, hint=hint)


def review_unavailable(cause: str, hint: str = "Try again in a moment.") -> Fault:
    error = "the cluster cannot say whose the token is"
    return Fault(Kind.UNAVAILABLE, "review_unavailable", error, detail=cause[:400], hint=hint, retry_after=1.0)
