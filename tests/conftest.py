"""How properties are checked: on the same examples in every run, and without deadlines, which a busy machine misses.

``pytest --hypothesis-profile=search`` tries new examples in every run; ``make nightly`` (the profile ``nightly``) tries
UPRIVER_EXAMPLES_FACTOR times as many of them, also where a test names its own number (``tests/support/examples.py``).
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from tests.support.examples import USUAL

FACTOR = int(os.environ.get("UPRIVER_EXAMPLES_FACTOR", "20"))

# ``derandomize`` is set here because Hypothesis turns it on by itself where it recognises a CI service.
settings.register_profile(
    "search", max_examples=USUAL, deadline=None, derandomize=False, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", settings.get_profile("search"), max_examples=FACTOR * USUAL)
settings.register_profile("same", settings.get_profile("search"), derandomize=True, database=None)
settings.load_profile("same")
