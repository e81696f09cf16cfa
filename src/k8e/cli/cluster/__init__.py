"""`k8e cluster`, `k8e agent` and `k8e server --cluster`: a Kubernetes cluster of one's own (docs/cluster.md)."""
