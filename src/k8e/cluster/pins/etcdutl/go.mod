module k8e.local/etcdutl

go 1.26.0

require go.etcd.io/etcd/etcdutl/v3 v3.7.3
