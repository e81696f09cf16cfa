"""Sandboxes on this machine."""

from k8e.engine.local.engine import LocalEngine

__all__ = ["LocalEngine"]
