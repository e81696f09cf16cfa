"""Images by name: who owns which. The engine knows images by their digests; what a name means depends on its owner.

A name belongs to the payer who pulled or imported it: a user of this machine, or a tenant of the gateway. A private
image that one payer pulled with a password is not open to others, though the engine has it; another payer who may have
it pulls it too, which costs one request to the registry. `k8e/base`, which root builds out of the distribution's
packages, is shared by all.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from k8e.core import checks
from k8e.core.access.access import Payer, choose_tenant, find_payer, require_scope, sees_all
from k8e.core.checks import BASE, HOST
from k8e.core.errors import Fault, Kind
from k8e.core.log.audit import call
from k8e.core.log.daemon_log import note
from k8e.core.model import REMOTE, Caller, NamedImage, Scope
from k8e.core.parts import Parts
from k8e.core.pool.pool import Pool
from k8e.core.sessions.sessions import Registry
from k8e.core.store.records import ImageRecord
from k8e.core.tasks import stop, wait_done
from k8e.core.translation import translated_image
from k8e.engine.images import Credentials, Image, Report
from k8e.engine.reference import InvalidReference, parse_reference

_SHARED: Final = Payer(0, "")  # the owner of what all may use
_AT_ONCE: Final = 4  # pulls and imports of one payer


class Images:
    """Implements `contract.ImageService`."""

    def __init__(self, parts: Parts, registry: Registry, pool: Pool) -> None:
        self._parts = parts
        self._engine = parts.engine
        self._store = parts.store
        self._clock = parts.clock
        self._audit = parts.audit
        self._quotas = parts.settings.quotas
        self._registry = registry
        self._pool = pool
        self._working: collections.Counter[Payer] = collections.Counter()
        self._tasks: set[asyncio.Task[Any]] = set()

    # Getting

    @call("pull_image")
    async def pull(
        self, caller: Caller, name: str, credentials: Credentials | None, report: Report, tenant: str = ""
    ) -> NamedImage:
        payer, canonical = self._admit(caller, tenant), checks.check_image(name)
        if canonical in (HOST, BASE) or canonical.startswith("sha256:"):
            hint = "Root builds it: `k8e image build-base`." if canonical == BASE else "Give it a name."
            raise Fault(Kind.INVALID, "invalid_argument", f"image: {name} is in no registry", hint=hint, field="image")
        await self._check_room(payer)
        with self._turn(payer), translated_image(f"pulling {name}"):
            image = await self._do(self._engine.images.pull(canonical, credentials, report))
        return await self._keep(caller, payer, canonical, image, "image_pulled")

    @call("import_image")
    async def add(
        self, caller: Caller, pieces: AsyncIterable[bytes], name: str, report: Report, tenant: str = ""
    ) -> NamedImage:
        payer, canonical = self._admit(caller, tenant), _check_own_name(name) if name else ""
        await self._check_room(payer)
        with self._turn(payer), translated_image("importing the image"):
            image = await self._do(self._engine.images.take(pieces, report))
        canonical = canonical or _name_by_archive(image.names)
        return await self._keep(caller, payer, canonical, image, "image_imported")

    @call("build_base")
    async def build_base(self, caller: Caller, report: Report) -> NamedImage:
        require_scope(caller, Scope.ADMIN)
        with self._turn(_SHARED), translated_image(f"building {BASE}"):
            image = await self._do(self._engine.images.build_base(report))
        return await self._keep(caller, _SHARED, BASE, image, "image_built")

    def _admit(self, caller: Caller, tenant: str) -> Payer:
        if caller.uid == REMOTE:
            require_scope(caller, Scope.ADMIN)  # else tenants could have this machine ask whatever it can reach
        return _payer(caller, tenant)

    async def _keep(self, caller: Caller, payer: Payer, name: str, image: Image, event: str) -> NamedImage:
        await self._check_room(payer, image)
        before = await self._store.find_image(payer.owner, payer.tenant, name)
        now = self._clock.wall()
        record = ImageRecord(payer.owner, payer.tenant, name, image.digest, now, now)
        await self._audit.record(event, caller=caller.label, image=name, digest=image.digest, size=image.size)
        await self._store.put_image(record)
        note(event, image=name, digest=image.digest)
        if before is not None and before.digest != image.digest:
            await self._sweep()
        return _show(record, image)

    # Asking

    async def resolve(self, owner: int, tenant: str, name: str) -> str:
        """The digest of the image that a session is made of, or its reference, or `host`."""
        canonical = checks.check_image(name)
        if canonical == HOST:
            return HOST
        if canonical != BASE and not canonical.startswith("sha256:"):
            with translated_image(f"looking for {name}"):
                referred = self._engine.images.refer(canonical)
            if referred:
                return referred
        payer = find_payer(owner, tenant)
        record = await self._find(payer, canonical)
        if record is not None:
            with translated_image(f"looking for {name}"):
                found = await self._engine.images.find(record.digest)
            if found is not None:
                await self._store.use_image(record, self._clock.wall())
                return record.digest
        raise _missing(name, canonical)

    @call("images")
    async def list(self, caller: Caller, name: str = "") -> Sequence[NamedImage]:
        payer = _payer(caller)
        wanted = checks.check_image(name, "name") if name else ""
        if wanted:
            record = await self._find(payer, wanted)
            records = [] if record is None else [record]
        else:
            everything = await self._store.images()
            records = [each for each in everything if sees_all(caller) or _is_usable(each, payer)]
        shown = []
        for record in records:
            with translated_image("listing images"):
                image = await self._engine.images.find(record.digest)
            if image is not None:
                shown.append(_show(record, image))
        return shown

    async def _find(self, payer: Payer, name: str) -> ImageRecord | None:
        if name == BASE:
            return await self._store.find_image(*_SHARED, BASE)
        found = await self._store.find_image(payer.owner, payer.tenant, name)
        if found is None and name.startswith("sha256:"):
            base = await self._store.find_image(*_SHARED, BASE)
            found = base if base is not None and base.digest == name else None
        return found

    # Removing

    @call("remove_image")
    async def remove(self, caller: Caller, name: str, tenant: str = "") -> int:
        payer, canonical = _payer(caller, tenant), checks.check_image(name)
        if canonical == BASE:
            require_scope(caller, Scope.ADMIN)
        record = await self._find(payer, canonical)
        if record is None:
            raise _missing(name, canonical)
        if users := self._users(record):
            raise Fault(
                Kind.CONFLICT,
                "image_in_use",
                f"{name} is what sessions are made of",
                detail=", ".join(users[:10]),
                hint="Destroy them first.",
            )
        await self._audit.record("image_removed", caller=caller.label, image=record.name, digest=record.digest)
        await self._store.forget_images([record])
        return await self._sweep()

    @call("prune_images")
    async def prune(self, caller: Caller, unused_for: float = 0, tenant: str = "") -> tuple[Sequence[str], int]:
        """Everything that is the caller's and not needed now, but for what takes minutes to build again."""
        checks.check_number("unused_for", unused_for, 0, checks.MAX_TTL * 100)
        payer, oldest = _payer(caller, tenant), self._clock.wall() - unused_for
        unused = [
            record
            for record in await self._store.images()
            if (record.owner, record.tenant) == payer
            and record.name != BASE
            and record.last_used <= oldest
            and not self._users(record)
        ]
        names = [_familiar(record.name) for record in unused]
        await self._audit.record("images_pruned", caller=caller.label, images=names)
        await self._store.forget_images(unused)
        return names, await self._sweep()

    async def _sweep(self) -> int:
        """The engine keeps what has a name, and what sandboxes are made of."""
        named = {record.digest for record in await self._store.images()}
        made = {live.record.digest for live in self._registry} - {HOST}
        await self._pool.forget_images({HOST, *named})
        with translated_image("removing images"):
            return await self._engine.images.retain(named | made)

    def _users(self, record: ImageRecord) -> Sequence[str]:
        """The sessions of the same payer that are made of it; of the shared image, all."""
        return sorted(
            live.session_id
            for live in self._registry
            if live.record.digest == record.digest
            and (record.name == BASE or live.payer == (record.owner, record.tenant))
        )

    # How much

    async def _check_room(self, payer: Payer, coming: Image | None = None) -> None:
        """Whether there may be one more; with `coming`: of its size."""
        theirs = [record for record in await self._store.images() if (record.owner, record.tenant) == payer]
        if self._quotas.images and coming is None and len(theirs) >= self._quotas.images:
            raise _exhausted("too_many_images", f"you have {len(theirs)} images already")
        if not self._quotas.image_bytes:
            return
        total = await self._size({record.digest for record in theirs} - {coming.digest if coming else ""})
        if total + (coming.size if coming else 1) > self._quotas.image_bytes:
            if coming is not None:
                await self._sweep()
            raise _exhausted("too_many_image_bytes", f"your images have more than {self._quotas.image_bytes} bytes")

    async def _size(self, digests: Collection[str]) -> int:
        with translated_image("measuring images"):
            found = [await self._engine.images.find(digest) for digest in digests]
        return sum(image.size for image in found if image is not None)

    @contextmanager
    def _turn(self, payer: Payer) -> Iterator[None]:
        if self._working[payer] >= _AT_ONCE:
            raise Fault(
                Kind.EXHAUSTED,
                "too_many_pulls",
                f"you are getting {_AT_ONCE} images at the same time already",
                hint="Try again when one of them is there.",
                retry_after=5.0,
            )
        self._working[payer] += 1
        try:
            yield
        finally:
            self._working[payer] -= 1
            self._working = +self._working

    # Ending

    async def _do(self, work: Coroutine[Any, Any, Image]) -> Image:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        try:
            await wait_done(task)
        finally:
            self._tasks.discard(task)
            if not task.done():
                await stop(task)
        if task.cancelled():
            raise Fault(Kind.UNAVAILABLE, "daemon_stopping", "the daemon is stopping", hint="Try again in a moment.")
        return task.result()

    async def close(self) -> None:
        """Stops what is under way; what was downloaded of it is kept."""
        await stop(*self._tasks)


def _payer(caller: Caller, tenant: str = "") -> Payer:
    """Whose names are meant: the caller's own, or those of a tenant of the gateway, whom only an admin speaks for."""
    checks.check_caller(caller)
    if tenant:
        require_scope(caller, Scope.ADMIN)
        return find_payer(REMOTE, checks.check_name("tenant", tenant))
    return find_payer(caller.uid, choose_tenant(caller, ""))


def _is_usable(record: ImageRecord, payer: Payer) -> bool:
    return (record.owner, record.tenant) == payer or record.name == BASE


def _show(record: ImageRecord, image: Image) -> NamedImage:
    name = _familiar(record.name)
    return NamedImage(name, record.digest, image.size, record.owner, record.tenant, record.added, record.last_used)


def _familiar(name: str) -> str:
    return name if name == BASE else parse_reference(name).short


def _check_own_name(name: str) -> str:
    canonical = checks.check_image(name, "name")
    if canonical in (HOST, BASE) or "@" in canonical or canonical.startswith("sha256:"):
        checks.refuse("name", "is taken: it means something else", "Such as mine:1.")
    return canonical


def _name_by_archive(names: Sequence[str]) -> str:
    """The name that the archive says, if its owner could have given it."""
    for name in names:
        try:
            # Some tools write only the tag.
            if ":" in name or "/" in name:
                return _check_own_name(str(parse_reference(name)))
        except (InvalidReference, Fault):
            continue
    return checks.refuse("name", "is missing, and the archive does not say one", "k8e image import FILE --name mine:1")


def _missing(name: str, canonical: str) -> Fault:
    hint = "Root builds it: `k8e image build-base`." if canonical == BASE else f"k8e image pull {name}"
    return Fault(Kind.NOT_FOUND, "image_not_found", f"there is no image {name} here", hint=hint, field="image")


def _exhausted(code: str, error: str) -> Fault:
    return Fault(Kind.EXHAUSTED, code, error, hint="Remove some: `k8e image prune`, `k8e image remove NAME`.")
