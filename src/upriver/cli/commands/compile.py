"""``upriver compile``: compile all kernels now, instead of each when it is first used."""

from __future__ import annotations

import time

import click


@click.command("compile")
def compile_kernels() -> None:
    """Compile now what would otherwise be compiled when a node first starts, or at the first read.

    Useful when a container image is built. The result is kept beside the installed package, or in the directory that
    NUMBA_CACHE_DIR names.
    """
    from rich.console import Console

    from upriver.node.warmup import warm_up

    began = time.monotonic()
    with Console(stderr=True).status("compiling ..."):
        warm_up()
    click.echo(f"compiled in {time.monotonic() - began:.1f} s")
