"""Records in objects of Kubernetes: a `SandboxRecord` for each name that the store mirrors.

One gateway writes, and knows the version of what it wrote. An object with another version was written by a person,
whose change is replaced, or by a later leader, and then this one has lost its lease: the object's term says which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightkube.core.dictmixin import DictMixin
from lightkube.core.resource import ApiInfo, NamespacedResourceG, ResourceDef
from lightkube.models.meta_v1 import ObjectMeta, OwnerReference

from k8e.engine import EngineError
from k8e.engine.kubernetes import names
from k8e.engine.kubernetes.api import Api, ApiRefused

GROUP: Final = "k8e.dev"
VERSION: Final = "v1alpha1"
_KIND: Final = "SandboxRecord"
_UNREADABLE: Final[Mapping[str, Any]] = {"sessions": [{}]}  # as a content: a session that nothing is known of
_ATTEMPTS: Final = 3  # of one write, when other writers come in between


class SandboxRecord(NamespacedResourceG, DictMixin):
    apiVersion: str | None = None  # noqa: N815 - as the API has it
    kind: str | None = None
    metadata: ObjectMeta | None = None
    spec: dict[str, Any] | None = None

    _api_info = ApiInfo(
        resource=ResourceDef(GROUP, VERSION, _KIND),
        plural="sandboxrecords",
        verbs=["delete", "get", "list", "patch", "post", "put", "watch"],
    )


class Fenced(EngineError):
    """A later leader writes these records."""


@dataclass(frozen=True, slots=True)
class _Known:
    uid: str
    version: str


class ObjectMirror:
    """Implements `core.store.mirrored.Mirror`."""

    def __init__(self, api: Api, gateway: str, term: int = 0, fenced: Callable[[], None] = lambda: None) -> None:
        """`fenced` is called when a later leader's record is found: this one must end."""
        self._api = api
        self._gateway = gateway
        self._term = term
        self._fenced = fenced
        self._known: dict[str, _Known] = {}

    async def load(self) -> Sequence[tuple[str, Mapping[str, Any]]]:
        self._known.clear()
        found = []
        try:
            items, _ = await self._api.list(SandboxRecord, names.selector(self._gateway))
        except ApiRefused as refused:
            raise _explain(refused) from refused
        for item in items:
            spec = item.spec or {}
            self._check_term(spec)
            # By its own word, because an object's name may be a digest; a record without it cannot be read either way.
            name = spec.get("name")
            content = spec.get("content")
            if isinstance(name, str):
                self._remember(name, item)
            found.append((str(name), content if isinstance(content, dict) else _UNREADABLE))
        return found

    async def write(self, name: str, content: Mapping[str, Any] | None) -> None:
        for _ in range(_ATTEMPTS):
            try:
                if content is None:
                    return await self._delete(name)
                return await self._put(name, content)
            except ApiRefused as refused:
                if refused.code not in (404, 409):
                    raise
                await self._look(name)
        raise EngineError("records", f"the record of {name} is changed by others all the time")

    def name_owner(self, name: str) -> OwnerReference | None:
        """The record of that name, as the owner of another object; None: there is none."""
        known = self._known.get(name)
        if known is None:
            return None
        version, uid = f"{GROUP}/{VERSION}", known.uid
        return OwnerReference(apiVersion=version, kind=_KIND, name=names.object_name(name), uid=uid)

    async def close(self) -> None:
        """The API is for its owner to close."""

    async def _put(self, name: str, content: Mapping[str, Any]) -> None:
        known = self._known.get(name)
        meta = ObjectMeta(name=names.object_name(name), labels=dict(names.labels(self._gateway)))
        if known is not None:
            meta.resourceVersion, meta.uid = known.version, known.uid
        spec = {"name": name, "term": self._term, "content": dict(content)}
        record = SandboxRecord(apiVersion=f"{GROUP}/{VERSION}", kind=_KIND, metadata=meta, spec=spec)
        if known is not None:
            written = await self._api.replace(record)
        else:
            try:
                written = await self._api.create(record)
            except ApiRefused as refused:
                raise _explain(refused) from refused
        self._remember(name, written)

    async def _delete(self, name: str) -> None:
        known = self._known.get(name)
        if known is not None and not await self._api.delete(
            SandboxRecord, names.object_name(name), known.uid, version=known.version
        ):
            await self._look(name)
            if name in self._known:
                raise ApiRefused(409, f"the record of {name} was changed")
        self._known.pop(name, None)

    async def _look(self, name: str) -> None:
        """Learns what is there now."""
        found = await self._api.get(SandboxRecord, names.object_name(name))
        if found is None:
            self._known.pop(name, None)
            return
        self._check_term(found.spec or {})
        self._remember(name, found)

    def _remember(self, name: str, record: SandboxRecord) -> None:
        meta = record.metadata
        assert meta is not None
        self._known[name] = _Known(meta.uid or "", meta.resourceVersion or "")

    def _check_term(self, spec: Mapping[str, Any]) -> None:
        term = spec.get("term")
        if isinstance(term, int) and term > self._term:
            self._fenced()
            raise Fenced("lease", f"the records are those of a later leader (term {term}, this one has {self._term})")


def _explain(refused: ApiRefused) -> EngineError:
    """Of a list or a new object "not found" is said when the cluster does not know its kind."""
    if refused.code != 404:
        return refused
    hint = "kubectl apply -f deploy/kubernetes/records.yaml"
    return EngineError("records", f"the cluster does not know what a {_KIND} is", hint)
