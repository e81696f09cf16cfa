"""Warm sandboxes that the engine has ready by itself: core says how many of which kind, and `create` takes them."""

from __future__ import annotations

from collections.abc import Mapping

from k8e.core.pool.demand import Template
from k8e.engine import Engine


class Stock:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ready: Mapping[Template, int] = {}
        self.kept = False  # whether the engine does so, as far as it was asked

    @property
    def total(self) -> int:
        return sum(self._ready.values())

    def count(self, template: Template) -> int:
        """How many of that kind were ready when the engine last said so."""
        return self._ready.get(template, 0)

    async def tell(self, targets: Mapping[Template, int]) -> None:
        """EngineError: what was said before holds."""
        kinds = {template.spec: template for template in targets}
        found = await self._engine.keep_ready({spec: targets[template] for spec, template in kinds.items()})
        self.kept = found is not None
        self._ready = {kinds[spec]: number for spec, number in (found or {}).items()}
