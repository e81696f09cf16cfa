module k8e.local/cilium

go 1.26.0

require github.com/cilium/cilium v1.20.2

// Cilium's go.mod names versions of these that a proxy need not have: commits, and a module that only its operator imports.
replace (
	github.com/cilium/statedb => github.com/cilium/statedb v0.8.3
	github.com/osrg/gobgp/v4 => github.com/osrg/gobgp/v4 v4.7.0
	sigs.k8s.io/controller-tools => github.com/cilium/controller-tools v0.21.0-1
	sigs.k8s.io/mcs-api/controllers => ./mcs-api-controllers
)
