"""``upriver compile``: kernels are compiled when they are first used, and kept beside the code; or all of them now."""

from __future__ import annotations

import time

import click


@click.command("compile")
def compile_kernels() -> None:
    """Compile now what the first start of a node or the first read would compile.

    For images of containers, and before a demonstration. What is compiled is kept beside the installed package, or in
    the directory that NUMBA_CACHE_DIR names.
    """
    from rich.console import Console

    from upriver.node.warmup import warm_up

    began = time.monotonic()
    with Console(stderr=True).status("compiling ..."):
        warm_up()
    click.echo(f"compiled in {time.monotonic() - began:.1f} s")
