"""Variables of persistent sessions in Secrets of Kubernetes, one for each session: so the next leader has them, too.

A session's record owns its Secret. A leader removes the Secret at the end of the session; one that was killed before
that, or whose record was removed by a person, has it removed by the cluster's garbage collector. So this account needs
no right to list Secrets.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection
from pathlib import Path
from typing import Final

from lightkube.models.meta_v1 import ObjectMeta, OwnerReference
from lightkube.resources.core_v1 import Secret

from k8e.core.sandbox.environment import Variables
from k8e.core.store.environments import read_environment, write_environment
from k8e.core.store.schema import StoreFailed
from k8e.damage import Damaged, Damages
from k8e.engine import EngineError
from k8e.engine.kubernetes import names
from k8e.engine.kubernetes.api import Api, ApiRefused
from k8e.replicas.objects import ObjectMirror

TYPE: Final = "k8e.dev/environment"
_ENTRY: Final = "environment"
_ATTEMPTS: Final = 3  # of one write, when other writers come in between
_CONTROL: Final = "variables of a session"
_HINT: Final = "The cluster does not answer, or the gateway lacks a right (docs/kubernetes.md): nothing was changed."


class SecretEnvironments:
    """Implements `core.store.environments.Environments`."""

    def __init__(self, api: Api, gateway: str, records: ObjectMirror) -> None:
        self._api = api
        self._gateway = gateway
        self._records = records
        self.damages = Damages(Path("/nowhere"))

    async def keep(self, sandbox: str, env: Variables) -> None:
        try:
            await self._keep(sandbox, env)
        except EngineError as error:
            raise StoreFailed(error, error.hint or _HINT) from error

    async def recall(self, sandbox: str) -> Variables:
        try:
            found = await self._get(sandbox)
        except EngineError as error:
            raise StoreFailed(error, error.hint or _HINT) from error
        if found is None:
            return ()
        try:
            return read_environment(base64.b64decode((found.data or {}).get(_ENTRY, ""), validate=True))
        except (Damaged, binascii.Error) as error:
            # It stays where it is: `keep` replaces it, the end of the session removes it.
            self.damages.tell(Path(f"secret:{self._api.namespace}/{names.object_name(sandbox)}"), error)
            return ()

    async def forget(self, sandbox: str) -> None:
        try:
            found = await self._get(sandbox)
            if found is not None and found.metadata is not None:
                await self._api.delete(Secret, names.object_name(sandbox), found.metadata.uid or "")
        except EngineError as error:
            raise StoreFailed(error, error.hint or _HINT) from error

    async def forget_others(self, sandboxes: Collection[str]) -> None:
        """Nothing: a session that was not ended to the end is ended again, and a record takes its Secret with it."""

    async def _keep(self, sandbox: str, env: Variables) -> None:
        data = {_ENTRY: base64.b64encode(write_environment(env)).decode()}
        for _ in range(_ATTEMPTS):
            found = await self._get(sandbox)
            # Not `blockOwnerDeletion`, for which the account would need rights to the record's finalizers.
            meta = ObjectMeta(
                name=names.object_name(sandbox),
                labels=dict(names.labels(self._gateway)),
                ownerReferences=[self._name_owner(sandbox)],
            )
            if found is not None and found.metadata is not None:
                meta.resourceVersion, meta.uid = found.metadata.resourceVersion, found.metadata.uid
            secret = Secret(apiVersion="v1", kind="Secret", metadata=meta, type=TYPE, data=data)
            try:
                await (self._api.create(secret) if found is None else self._api.replace(secret))
                return
            except ApiRefused as refused:
                if refused.code not in (404, 409):
                    raise
        raise EngineError(_CONTROL, f"the Secret of {sandbox} is changed by others all the time", "try again")

    async def _get(self, sandbox: str) -> Secret | None:
        found = await self._api.get(Secret, names.object_name(sandbox))
        if found is not None and (found.type != TYPE or not self._is_own(found)):
            cause = f"the Secret {self._api.namespace}/{names.object_name(sandbox)} is not this gateway's"
            raise EngineError(_CONTROL, cause, "see whose it is, and rename or remove it")
        return found

    def _is_own(self, secret: Secret) -> bool:
        labels = (secret.metadata.labels if secret.metadata is not None else None) or {}
        return labels.get(names.GATEWAY) == self._gateway

    def _name_owner(self, sandbox: str) -> OwnerReference:
        owner = self._records.name_owner(sandbox)
        if owner is None:
            raise EngineError(_CONTROL, f"there is no record of {sandbox}", "create the session again")
        return owner
