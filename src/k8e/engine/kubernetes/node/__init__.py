"""The helper of a node: applies the lists of hosts of the sandboxes that run there (docs/kubernetes-egress.md).

pod_link    which interface of the node leads to a pod; making it the pod's own wire
machine     the node's part of the network: as local.network.machine, for wires that the cluster's network made
reports     what was refused, for gateways that ask
helper      all of it together: from the pods of the node to rules in force
"""
