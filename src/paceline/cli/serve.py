"""`paceline serve`: an OpenAI-compatible server, and a page that shows speculation at work."""

from __future__ import annotations

from typing import Any

import click

from paceline.cli.options import RULES, TARGET, DraftTokens, apply, as_number, need_ray, one_target

_ENGINE_FLAGS = (
    "drafter",
    "adapter",
    "device",
    "dtype",
    "draft_tokens",
    "draft_tree",
    "verify",
    "max_model_len",
    "max_batch",
    "quantize",
    "threads",
    "tensor_parallel",
    "media",
    "mmproj",
    "image_tokens",
    "preload_media",
    "native",
    "profile_dir",
    "remeasure",
)
_FLEET_FLAGS = ("replicas", "max_replicas", "ray_address", "ready_timeout")


@click.command(name="serve", short_help="Serve a model to OpenAI clients and to the browser.")
@apply(TARGET)
@click.option(
    "--drafter",
    help="auto, none, ngram, lookahead, mtp, mtp+ngram, eagle3, dflash, heads, or a drafter's folder or hub id.",
)
@click.option(
    "--adapter", multiple=True, help="A LoRA adapter to merge into the target (folder or hub id); one."
)
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on, 0 for any.  [default: 8000]")
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
    "--config", "config_file", type=click.Path(), help="TOML file with tables [server] and [engine]."
)
@click.option("--device", help="auto, cpu, cuda, cuda:N or mps.")
@click.option("--dtype", help="auto, float32, bfloat16 or float16.")
@click.option("--draft-tokens", type=DraftTokens(), help="How many to draft at most, 0..16, or auto.")
@click.option("--draft-tree", metavar="DEPTHxWIDTH", help="Draft trees, for instance 4x2, instead of chains.")
@click.option("--verify", type=click.Choice(RULES), help="How drafts are checked; typical is lossy.")
@click.option("--max-model-len", type=int, help="Tokens per text.")
@click.option("--max-batch", type=int, help="Texts computed side by side.")
@click.option("--quantize", type=click.Choice(["int8", "int4"]), help="Quantize the target's weights.")
@click.option("--threads", type=int, help="CPU threads.")
@click.option("--tensor-parallel", type=int, help="Processes that compute the target together.")
@click.option(
    "--media/--no-media", default=None, help="Read pictures and sound, where the model can.  [default: on]"
)
@click.option("--mmproj", metavar="FILE", help="The file with a GGUF model's towers.")
@click.option(
    "--image-tokens",
    type=click.Choice(["70", "140", "280", "560", "1120"]),
    callback=as_number,
    help="Soft tokens of a picture that names no budget, at most.",
)
@click.option(
    "--preload-media",
    is_flag=True,
    default=None,
    help="Load the towers at start, not with the first picture.",
)
@click.option("--native/--no-native", default=None, help="Compiled kernels on the CPU.")
@click.option(
    "--profile-dir",
    envvar="PACELINE_PROFILE_DIR",
    help="Keeps what start-up measured; none: nothing.  [default: the user's cache]",
)
@click.option("--remeasure", is_flag=True, default=None, help="Measure again at start-up.")
@click.option(
    "--request-log/--no-request-log", default=None, help="One line to stderr for each request.  [default: on]"
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
def command(target: str | None, named: str | None, config_file: str | None, **flags: Any) -> None:
    """Serve TARGET (default: the bundled demo pair) to OpenAI clients, with a page at /.

    Binds to loopback unless there is --host. Flags win over the file given with --config. With --replicas this process is
    the ingress of as many engines, see docs/cluster.md.
    """
    try:
        from paceline.server.start import start
    except ModuleNotFoundError as error:
        from paceline.errors import UsageError

        raise UsageError(
            f"{error.name} is missing: install the server with `pip install paceline[serve]`"
        ) from error
    from paceline.cli.options import profile_dir

    engine = {name: flags.pop(name) for name in _ENGINE_FLAGS} | {
        "target": one_target(target, named, None) if (target, named) != (None, None) else None
    }
    engine["adapter"] = engine["adapter"] or None
    for name in ("allowed_hosts", "cors_origins", "served_model_names"):
        flags[name] = flags[name] or None
    place = _elsewhere({name: flags.pop(name) for name in _FLEET_FLAGS})
    start(config_file, flags, engine, click.echo, profile_dir(), place)


def _elsewhere(fleet: dict[str, Any]) -> Any:
    """Where the replicas are, None if none are asked for."""
    said = {name: value for name, value in fleet.items() if value is not None}
    if not said:
        return None
    need_ray()
    from paceline.cluster.config import FleetConfig

    config = FleetConfig(**said)
    from paceline.cluster.fleet import Elsewhere  # Ray, once nothing is wrong with the options

    return Elsewhere(config)
