module k8e.local/gvisor-shim

go 1.26.3

require gvisor.dev/gvisor v0.0.0-20260701204157-69c2d17aea96
