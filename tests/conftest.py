"""How properties are checked: on the same examples every time, and not against a clock, which a busy machine upsets.

``pytest --hypothesis-profile=search`` tries other examples in every run, as one wants while looking for faults;
``make nightly`` (the profile ``nightly``) also tries many more of them.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "nightly", settings.get_profile("search"), max_examples=int(os.environ.get("UPRIVER_EXAMPLES", "2000"))
)
settings.register_profile("same", settings.get_profile("search"), derandomize=True, database=None)
settings.load_profile("same")
