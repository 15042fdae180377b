"""`warmpath stop`: ends the applications of a Ray cluster as `warmpath serve` ends its own."""

import logging
from typing import Annotated

import typer

from serve_app.cli.console import console, fail
from serve_app.cli.draining import drain


def stop(
    timeout_s: Annotated[
        float, typer.Option(min=0, help="time for answers under way; later ones end with an error")
    ] = 30.0,
    address: Annotated[
        str, typer.Option(envvar="RAY_ADDRESS", help="the Ray cluster's; auto: this machine's")
    ] = "auto",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
) -> None:
    """Stop what `serve deploy` started, on a Ray cluster: new requests get a 503, and answers under way are finished.

    `serve shutdown` would cut them at once.
    """
    import ray
    from ray import serve as ray_serve

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        fail(f"no Ray cluster answers at {address}: {error}")
    names = [*ray_serve.status().applications]
    if not names:
        fail("no application runs on this cluster")
    if not yes:
        typer.confirm(f"Stop {', '.join(names)}?", abort=True, err=True)
    console.print(f"stopping {', '.join(names)}: answers under way have {timeout_s:g} s")
    drain(names, timeout_s, console)
    ray_serve.shutdown()
    ray.shutdown()
    console.print("stopped; `ray stop` ends Ray on each node")
