"""`paceline serve`: an OpenAI-compatible server, and a page that shows speculation at work."""

from __future__ import annotations

from typing import Any

import click

from paceline.cli.options import (
    FROM_ENVIRONMENT,
    Command,
    apply,
    engine_options,
    given,
    need_ray,
    one_target,
    profile_dir,
    sampling_options,
)
from paceline.config import EngineConfig
from paceline.core import SamplingParams
from paceline.options import rows_of

_FLEET_FLAGS = ("replicas", "max_replicas", "ray_address", "ready_timeout")


@click.command(
    name="serve",
    cls=Command,
    own="Server",
    first=(
        "host",
        "port",
        "api_key_file",
        "config_file",
        "drafter",
        "max_model_len",
        "max_batch",
        "temperature",
    ),
    short_help="Serve a model to OpenAI clients and to the browser.",
    epilog=FROM_ENVIRONMENT,
)
@click.argument("targets", nargs=-1, metavar="[TARGET]...")
@click.option("--target", "named", metavar="TARGET", help="The same as the argument TARGET.")
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on, 0 for any.  [default: 8000]")
@click.option("--uds", type=click.Path(), help="A Unix socket to listen on, in place of host and port.")
@click.option("--ssl-certfile", type=click.Path(), help="A certificate (PEM): then https is spoken.")
@click.option("--ssl-keyfile", type=click.Path(), help="Its key, where that is in a file of its own.")
@click.option("--root-path", help="Where a proxy shows the server, for instance /llm.")
@click.option("--api-key-file", type=click.Path(), help="Keys, one per line, plain or as sha256:<hex>.")
@click.option("--without-key", is_flag=True, default=None, help="Listen on a network without any key.")
@click.option(
    "--allowed-host", "allowed_hosts", multiple=True, help="A name that may stand in the Host header."
)
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    help="An origin whose pages may ask here, or *; repeatable.",
)
@click.option("--model-name", help="What clients call the model.")
@click.option(
    "--served-model-name",
    "served_model_names",
    multiple=True,
    help="A further name for the model; repeatable.",
)
@click.option(
    "--strict", is_flag=True, default=None, help="Refuse unknown fields and models instead of warning."
)
@click.option(
    "--config",
    "config_file",
    type=click.Path(),
    help="TOML file with tables [server], [engine] and [sampling].",
)
@click.option(
    "--request-log/--no-request-log", default=None, help="One line to stderr for each request.  [default: on]"
)
@click.option(
    "--idle-unload",
    type=float,
    help="Seconds without a request after which a model is unloaded.  [default: never]",
)
@click.option(
    "--memory", metavar="SIZE", help="What the models may take together, e.g. 16G.  [default: what is free]"
)
@click.option("--max-texts", type=int, help="Texts waiting or running; more get status 429.")
@click.option(
    "--stream-interval", type=float, help="Seconds: faster tokens are sent together.  [default: 0.02]"
)
@click.option("--request-timeout", type=float, help="Seconds from a request's arrival to its last token.")
@click.option("--replicas", type=click.IntRange(min=1), help="Engines on a Ray cluster; needs paceline[ray].")
@click.option("--max-replicas", type=click.IntRange(min=1), help="As many as there is work for, up to that.")
@click.option("--ray-address", help="A Ray cluster to join, or auto.  [default: one of this machine alone]")
@click.option("--ready-timeout", type=float, help="Seconds for a replica to be ready.  [default: 600]")
@apply(engine_options("serve"))
@apply(sampling_options("serve"))
def command(targets: tuple[str, ...], named: str | None, config_file: str | None, **flags: Any) -> None:
    """Serve TARGET (default: the bundled demo pair) to OpenAI clients, with a page at /.

    Of several targets the first is loaded at start, the others when a request names them.

    Binds to loopback unless there is --host. Flags win over the file given with --config. Sampling options hold where a
    request leaves them out. With --replicas this process is
    the ingress of as many engines, see docs/cluster.md.
    """
    try:
        from paceline.server.start import start
    except ModuleNotFoundError as error:
        from paceline.errors import UsageError

        raise UsageError(
            f"{error.name} is missing: install the server with `pip install paceline[serve]`"
        ) from error
    place = _elsewhere({name: flags.pop(name) for name in _FLEET_FLAGS})
    engine, sampling = _taken(EngineConfig, flags), _taken(SamplingParams, flags)
    if len(targets) < 2 and (targets or named is not None):
        engine["target"] = one_target(next(iter(targets), None), named, None)
    elif named is not None:
        from paceline.errors import UsageError

        raise UsageError(
            f"--target {named} stands beside {len(targets)} targets: give all of them without --target"
        )
    server, several = given(flags) | {"sampling": sampling}, targets if len(targets) > 1 else ()
    start(config_file, server, engine, click.echo, profile_dir(), place, several)


def _taken(kind: type[Any], flags: dict[str, Any]) -> dict[str, Any]:
    """What was given of a table of options, taken out of `flags`."""
    return given({row.name: flags.pop(row.name) for row in rows_of(kind, "serve")})


def _elsewhere(fleet: dict[str, Any]) -> Any:
    """Where the replicas are, None if none are asked for."""
    given = {name: value for name, value in fleet.items() if value is not None}
    if not given:
        return None
    need_ray()
    from paceline.cluster.config import FleetConfig

    config = FleetConfig(**given)
    from paceline.cluster.fleet import Elsewhere  # Ray, once nothing is wrong with the options

    return Elsewhere(config)
