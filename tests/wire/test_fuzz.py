"""Runs the fuzz targets briefly on mutated examples; ``make fuzz`` runs them for longer."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fuzz"))
from targets import TARGETS, seeds


@st.composite
def mutated(draw, target):
    raw = bytearray(b"".join(draw(st.lists(st.sampled_from(seeds(target)), min_size=1, max_size=3))))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(raw) - 1))
        raw[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
        raw = raw or bytearray(1)
    return bytes(raw)


@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=examples(250), deadline=None)
@given(data=st.data())
def test_no_input_breaks_a_target(target, data):
    TARGETS[target](data.draw(mutated(target) | st.binary(max_size=120)))


@pytest.mark.parametrize("target", TARGETS)
def test_the_seeds_of_the_fuzzers_pass(target):
    for seed in seeds(target):
        TARGETS[target](seed)
