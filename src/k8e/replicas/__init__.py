"""Several gateways of one cluster: one leads, by a Lease, and has the records of all sessions, in objects; all serve
(docs/kubernetes-gateways.md)."""
