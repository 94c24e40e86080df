"""How many examples a property is tried on: the number that its test names, and many times that in ``make nightly``."""

from __future__ import annotations

from hypothesis import settings

USUAL = 100  # what Hypothesis tries when neither a test nor a profile names a number


def examples(usually: int) -> int:
    """For ``@settings(max_examples=...)``: as many times the usual number as the profile asks for."""
    return usually * settings().max_examples // USUAL
