"""Clusters of nodes, and replication between clusters.

``plan`` decides who owns what, and is pure; ``manager`` carries plans out over the nodes' management ports; ``mover``
and ``third_party`` carry DCP streams between nodes of no common cluster; ``local`` runs a cluster of processes on this
machine. A step that was interrupted can be repeated safely.
"""

from upriver.cluster.local import LocalCluster, local_cluster

__all__ = ["LocalCluster", "local_cluster"]
