"""`k8e server`, `k8e node-helper`, and `k8e doctor`, which also is `agentkernel doctor`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse


def serve(options: argparse.Namespace) -> int:
    if options.cluster:
        from k8e.cli.cluster.member import serve as serve_cluster

        return serve_cluster(options)
    if options.bin_dir or options.node_name or options.node_ip or options.disable_sandbox_matrix:
        from k8e.cli.process import Failure

        raise Failure("usage", "an option of a cluster is given without --cluster", hint="k8e server --cluster ...")
    from k8e.daemon.server import run_in_foreground

    run_in_foreground(options.engine, tenant_namespaces=options.tenant_namespaces)
    return 0


def help_node(options: argparse.Namespace) -> int:
    from k8e.daemon.node_helper import HelperArguments, run_node_helper

    run_node_helper(
        HelperArguments(
            node=options.node,
            namespace=options.namespace,
            address=options.address,
            port=options.port,
            state=options.state,
            kubeconfig=options.kubeconfig,
            nameservers=options.nameserver,
        )
    )
    return 0


def examine(options: argparse.Namespace) -> int:
    from k8e.daemon.doctor import run_cluster_doctor, run_doctor

    if options.engine == "kubernetes":
        if options.fix:
            from k8e.cli.process import Failure

            error, hint = "--fix completes an installation on this machine", "helm upgrade installs on a cluster"
            raise Failure("invalid_argument", error, hint=hint, more={"field": "--fix"})
        return run_cluster_doctor(as_json=options.json)
    if not options.fix:
        return run_doctor(as_json=options.json)
    from k8e.cli.install.install import hand_over, install

    hand_over(["doctor", "--fix", *(["--json"] if options.json else [])])
    return run_doctor(as_json=options.json, fix=True, install=install)
