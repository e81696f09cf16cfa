"""The parts that every room of core works with: `Service` makes them once and hands them to each class."""

from __future__ import annotations

from dataclasses import dataclass

from k8e.core.clock import Clock
from k8e.core.log.audit import Audit
from k8e.core.log.metrics import Metrics
from k8e.core.log.refusal_log import RefusalLog
from k8e.core.store.environments import Environments
from k8e.core.store.store import Store
from k8e.core.tasks import Tasks
from k8e.engine import Engine
from k8e.settings import Settings


@dataclass(frozen=True, slots=True)
class Parts:
    engine: Engine
    store: Store
    environments: Environments
    clock: Clock
    tasks: Tasks
    settings: Settings
    metrics: Metrics
    audit: Audit
    refusals: RefusalLog
