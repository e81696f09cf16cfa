"""Sandboxes made ahead of the session that takes them."""
