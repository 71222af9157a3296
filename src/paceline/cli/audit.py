"""`paceline audit`: is a server's speculation lossless? For users of any engine."""

from __future__ import annotations

import base64
import json
import mimetypes
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.audit.audit import Plan, Report
    from paceline.audit.client import Endpoint


@click.command()
@click.argument("url")
@click.option(
    "--against",
    metavar="URL",
    help="The reference, without speculation. Default: URL itself, with --against-body.",
)
@click.option("--model", help="The model's name at URL. Default: the first that it lists.")
@click.option("--against-model", help="The model's name at the reference. Default: the first that it lists.")
@click.option(
    "--body", metavar="JSON", help="Fields for every request to URL, e.g. to switch speculation on."
)
@click.option("--against-body", metavar="JSON", help="Fields for every request to the reference.")
@click.option("--key-env", metavar="NAME", help="The environment variable that holds URL's API key.")
@click.option("--key-file", type=click.Path(dir_okay=False), help="A file whose first line is URL's API key.")
@click.option(
    "--against-key-env", metavar="NAME", help="The variable with the reference's key. Default: as for URL."
)
@click.option(
    "--prompts", type=click.IntRange(1, 20), default=20, show_default=True, help="Greedy texts to compare."
)
@click.option(
    "--tokens", type=click.IntRange(1, 2048), default=64, show_default=True, help="Tokens of each text."
)
@click.option(
    "--samples",
    type=click.IntRange(0, 5000),
    default=200,
    show_default=True,
    help="Sampled texts of each side.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0.1, 2),
    default=1.0,
    show_default=True,
    help="Of the sampled texts.",
)
@click.option(
    "--near-tie",
    type=click.FloatRange(0, 5),
    default=0.3,
    show_default=True,
    help="Nats between two tokens that rounding may turn over.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(1, 3600),
    default=120,
    show_default=True,
    help="Seconds for one request.",
)
@click.option(
    "--image",
    "images",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Also ask about this picture, over chat completions; may be given several times.",
)
@click.option("--json", "json_path", metavar="FILE", help="Also write the report as JSON.")
def command(
    url: str, against: str | None, model: str | None, against_model: str | None, body: str | None,
    against_body: str | None, key_env: str | None, key_file: str | None, against_key_env: str | None,
    timeout: float, images: tuple[Path, ...], json_path: str | None, **effort: Any,
) -> None:  # fmt: skip
    """Ask URL, which speculates, and a reference, which does not, the same things; say whether they agree.

    \b
    paceline audit http://localhost:8000 --against http://localhost:8001
    paceline audit http://localhost:8000 --against-body '{"speculation": {"drafter": "none"}}'

    \b
    Greedy texts are compared token by token, each side also with its own repeat. Where two texts part, the gap
    between the two tokens shows a near-tie (rounding) or a fault. Short sampled texts are compared by chi-squared.
    Sampling parameters and logprobs must mean the same with speculation on.

    The exit code is 0 if it is lossless (near-ties are said), 1 if not, 3 if it is undecided.
    """
    from paceline.audit.audit import EXIT, Plan, to_text
    from paceline.audit.client import Endpoint

    if against is None and against_body is None:
        raise UsageError(
            "nothing to compare with: give --against URL, or --against-body for the same server without speculation"
        )
    key = _key(key_env, key_file)
    endpoint = Endpoint(url, model, key, _body("--body", body), timeout)
    other = Endpoint(
        against or url, against_model or (model if against is None else None),
        _key(against_key_env, None) or key, _body("--against-body", against_body), timeout,
    )  # fmt: skip
    report = _run(endpoint, other, Plan(**effort, images=tuple(map(_data_url, images))))
    click.echo(to_text(report))
    if json_path is not None:
        _write(json_path, json.dumps(report.to_json(), indent=1))
    sys.exit(EXIT[report.verdict])


def _run(one: Endpoint, other: Endpoint, plan: Plan) -> Report:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from paceline.audit.audit import Audit

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("asking", total=1.0)
        try:
            return Audit(
                one, other, plan, lambda what, share: progress.update(task, description=what, completed=share)
            ).run()
        finally:
            one.close()
            other.close()


def _data_url(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; give a picture's file") from error
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}; name a file in a folder you may write to"
        ) from error


def _key(variable: str | None, file: str | None) -> str | None:
    if variable is not None:
        value = os.environ.get(variable)
        if not value:
            raise UsageError(f"the environment variable {variable} is not set: export it, or use --key-file")
        return value
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the key file {file}: {error}") from error
        if not lines or not lines[0].strip():
            raise UsageError(f"the key file {file} is empty: its first line is the key")
        return lines[0].strip()
    return None


def _body(option: str, text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f'{option} is no JSON ({error}): give an object such as {{"seed": 1}}') from error
    if not isinstance(value, dict):
        raise UsageError(f'{option} is no JSON object: give one such as {{"seed": 1}}')
    return value
