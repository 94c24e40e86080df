"""Clusters of nodes, and replication between clusters.

``plan`` decides which node owns which vbucket, and is pure; ``manager`` carries plans out over the nodes' management
ports; ``mover`` and ``third_party`` carry DCP streams between nodes that are in no common cluster; ``local`` runs a
cluster of processes on this machine. A step that was interrupted can be repeated safely.
"""

from upriver.cluster.local import LocalCluster, local_cluster

__all__ = ["LocalCluster", "local_cluster"]
