"""The third party between two nodes: it tells a consumer to stream from a producer, and carries the bytes."""
