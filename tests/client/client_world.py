"""What the client's tests know of the node that they share."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

VBUCKETS = 8


def provoke(http_port: int, name: str, **arguments: Any) -> Any:
    """Make the node misbehave."""
    url = f"http://127.0.0.1:{http_port}/upriver/faults/{name}"
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(arguments).encode(), headers, method="POST")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())
