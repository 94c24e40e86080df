"""``make chaos SEED=n MINUTES=m``: see ``cluster_chaos``."""

import sys

from tests.cluster.cluster_chaos import main

if __name__ == "__main__":
    sys.exit(main())
