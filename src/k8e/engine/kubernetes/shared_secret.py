"""A Secret that the administrator has made, empty, and gateways fill: each needs no right but to read and patch this
one object."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Final

from lightkube.resources.core_v1 import Secret

from k8e.engine import EngineError
from k8e.engine.kubernetes import names
from k8e.engine.kubernetes.api import Api, ApiRefused

_CONTROL: Final = "gateway's Secret"
_TRIES: Final = 5
_CHANGED: Final = (409, 422)  # since it was read


class SharedSecret:
    def __init__(self, api: Api, name: str) -> None:
        self._api = api
        self._name = name

    def __str__(self) -> str:
        return f"{self._api.namespace}/{self._name}"

    async def read(self) -> Mapping[str, bytes]:
        return self._decode(await self._get())

    async def share(self, own: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """Returns the entries of these names: those of the gateway that came first, all of them, or its own now."""
        for _ in range(_TRIES):
            found = await self._get()
            held = self._decode(found)
            if missing := own.keys() - held.keys():
                if len(missing) < len(own):
                    cause = f"{self} has no {', '.join(sorted(missing))}"
                    raise EngineError(_CONTROL, cause, "put the content back from a copy")
                await self._add(found, own)
            else:
                return {name: held[name] for name in own}
        raise self._explain_changes()

    async def write(self, name: str, content: bytes) -> None:
        for _ in range(_TRIES):
            if await self._add(await self._get(), {name: content}):
                return
        raise self._explain_changes()

    async def _add(self, found: Secret, entries: Mapping[str, bytes]) -> bool:
        """False: it has changed since it was read."""
        assert found.metadata is not None
        texts = {name: base64.b64encode(content).decode() for name, content in entries.items()}
        operations: list[dict[str, Any]] = [
            {"op": "test", "path": "/metadata/resourceVersion", "value": found.metadata.resourceVersion}
        ]
        if found.data is None:
            operations.append({"op": "add", "path": "/data", "value": texts})
        else:
            operations += (
                {"op": "add", "path": f"/data/{names.escape(name)}", "value": text} for name, text in texts.items()
            )
        try:
            await self._api.patch(Secret, self._name, operations)
        except ApiRefused as refused:
            if refused.code not in _CHANGED:
                raise
            return False
        return True

    async def _get(self) -> Secret:
        found = await self._api.get(Secret, self._name)
        if found is None:
            hint = "the chart makes it: helm upgrade; or kubectl create secret generic, without content"
            raise EngineError(_CONTROL, f"there is no Secret {self}", hint)
        return found

    def _decode(self, secret: Secret) -> Mapping[str, bytes]:
        try:
            return {name: base64.b64decode(text) for name, text in (secret.data or {}).items()}
        except ValueError as error:
            raise EngineError(_CONTROL, f"{self} cannot be read: {error}", "put it back from a copy") from error

    def _explain_changes(self) -> EngineError:
        return EngineError(_CONTROL, f"{self} is changed all the time", "try again")
