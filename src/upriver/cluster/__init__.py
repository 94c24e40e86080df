"""The third party between two nodes, and the cluster that nodes make: replication, moves, failovers."""

from upriver.cluster.local import LocalCluster, local_cluster

__all__ = ["LocalCluster", "local_cluster"]
