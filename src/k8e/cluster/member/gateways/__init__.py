"""The gateways of sandboxes: one on each server, of which one leads (docs/kubernetes-gateways.md)."""
