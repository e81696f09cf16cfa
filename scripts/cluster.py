"""A real Kubernetes cluster on this machine, for tests and for trying things out (docs/cluster-for-tests.md).

cluster.py start    builds what is missing and starts it; says how to use it
cluster.py stop     ends it and leaves nothing; what was built stays
cluster.py build    only builds
cluster.py tools    only builds, also what tests need beside a cluster
cluster.py status   the running one, as JSON
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from k8e.cluster.build import build_components, build_tool, default_cache
from k8e.cluster.cluster import Cluster, find_cluster, start_cluster, stop_cluster
from k8e.cluster.components import HELM
from k8e.cluster.errors import ClusterError
from k8e.cluster.place import Addresses, Place

ROOT = Path(__file__).resolve().parent.parent


def say(text: str) -> None:
    print(f"cluster: {text}", file=sys.stderr, flush=True)


def describe(cluster: Cluster) -> str:
    program = cluster.components.program
    return f"""\
export KUBECONFIG={cluster.place.kubeconfig}
{program("kubectl")} get nodes,runtimeclasses
{program("ctr")} --address {cluster.place.containerd} --namespace k8s.io images import FILE
pods have addresses in {cluster.addresses.node_pods}, which this machine reaches; RuntimeClasses: native, gvisor
stop it: make cluster ARGS=stop"""


def run(options: argparse.Namespace) -> int:
    place = Place(options.folder.resolve())
    if options.verb == "stop":
        stop_cluster(place)
    elif options.verb == "status":
        found = find_cluster(place)
        if found is None:
            say(f"none runs in {place.root}")
            return 1
        print(json.dumps(found.body, indent=1))
    else:
        components = build_components(options.cache, say, cilium=options.cilium, addons=options.addons)
        if options.verb == "tools":
            build_tool(HELM, options.cache, say)
        if options.verb == "start":
            begin = time.monotonic()
            cluster = start_cluster(place, components, say, options.network)
            say(f"ready after {time.monotonic() - begin:.1f} s")
            print(describe(cluster))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A real Kubernetes cluster on this machine")
    parser.add_argument("verb", nargs="?", default="start", choices=["start", "stop", "build", "tools", "status"])
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "cluster", help="of the cluster")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="of what was built")
    parser.add_argument("--network", type=Addresses.parse, help="a /16; without it, one that the machine does not use")
    parser.add_argument("--cilium", action="store_true", help="with Cilium as the network of its pods")
    parser.add_argument("--addons", action="store_true", help="also what only a cluster of one's own has")
    try:
        return run(parser.parse_args(argv))
    except ClusterError as error:
        say(f"{error}; {error.hint}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
