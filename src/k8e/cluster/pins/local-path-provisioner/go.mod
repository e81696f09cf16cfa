module k8e.local/local-path-provisioner

go 1.26.0

require github.com/rancher/local-path-provisioner v0.0.30
