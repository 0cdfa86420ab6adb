"""Two local nodes of a Ray cluster, in a process of their own: ``python ray_nodes.py FOLDER``.

Prints the cluster's address, then does what the lines of stdin say (``kill`` the second node, ``add`` a new one), each answered
with ``done``; end of file stops the cluster.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

MEMORY = 80 << 20  # bytes of each node's object store: the least that Ray takes
NODE = {"num_cpus": 1, "object_store_memory": MEMORY}


def main() -> None:
    head = {**NODE, "include_dashboard": False, "temp_dir": sys.argv[1]}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    second = cluster.add_node(**NODE)
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "kill":
            cluster.remove_node(second, allow_graceful=False)
        else:
            second = cluster.add_node(**NODE)
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
