"""OCI images on this machine: pulled, imported or built, checked, and laid out for overlayfs."""

from k8e.engine.local.images.images import LocalImages
from k8e.engine.local.images.store import Store

__all__ = ["LocalImages", "Store"]
