"""A repository of the Hugging Face hub: the names and sizes of its files, parts of them, and errors in one line."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from paceline.errors import LoadError
from paceline.hub.names import HubName

T = TypeVar("T")
PAUSES = (1.0, 4.0)  # seconds before the second and the third try
PASSING = (429, 500, 502, 503, 504)  # answers of a server that is busy
TIMEOUT = 10.0  # seconds until the first bytes of a part


@contextmanager
def readable_errors(hub_id: str) -> Iterator[None]:
    """Turn what the hub's library raises into a LoadError of one line."""
    from huggingface_hub import errors

    try:
        yield
    except LoadError:
        raise
    except errors.GatedRepoError as error:
        raise LoadError(f"{hub_id} is gated: accept its licence on its page, then `hf auth login`") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError, errors.RevisionNotFoundError) as error:
        raise LoadError(
            f"{hub_id} is neither a local folder nor a repository you may read: check the spelling, or "
            "log in with `hf auth login`"
        ) from error
    except errors.SafetensorsParsingError as error:
        raise LoadError(
            f"{hub_id}: its weights have no readable header ({_line(error)}): report it there"
        ) from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        raise LoadError(
            f"cannot download {hub_id} ({_line(error)}): check the network, or give a local model folder"
        ) from error
    except (ImportError, ValueError) as error:  # of a proxy in the environment
        raise LoadError(
            f"cannot download {hub_id} ({_line(error)}): for a SOCKS proxy `pip install socksio`, else correct the "
            "proxy's address in the environment"
        ) from error
    except Exception as error:  # the HTTP client's own errors, whichever client the library uses
        if not type(error).__module__.startswith(("httpx", "httpcore", "requests", "urllib3")):  # httpx2, too
            raise
        raise LoadError(
            f"cannot download {hub_id} ({_line(error)}): check the network, or give a local model folder"
        ) from error


def patiently(work: Callable[[], T]) -> T:
    """What `work` gives, tried again after a pause where the hub is only busy."""
    for pause in PAUSES:
        try:
            return work()
        except Exception as error:
            if not _passes(error):
                raise
            time.sleep(pause)
    return work()


def _passes(error: BaseException | None) -> bool:
    """Whether a later try may do. The library puts the server's answer behind errors of its own."""
    from huggingface_hub import errors

    while error is not None:
        if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
            return error.response.status_code in PASSING
        error = error.__cause__ or error.__context__
    return False


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def downloaded(hub: HubName) -> Path | None:
    """The snapshot in the hub cache, with whatever was downloaded of it."""
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(hub.id, revision=hub.revision, local_files_only=True))
    except errors.LocalEntryNotFoundError as error:
        place = getattr(error, "snapshot_path", None)  # of one that lacks files, which are of no use here
        return None if place is None else Path(place)


def listing(hub: HubName) -> tuple[str, dict[str, int]]:
    """(commit, bytes of each file by its name); of what is downloaded where the hub cannot be asked. LoadError."""
    try:
        with readable_errors(hub.id):
            from huggingface_hub import HfApi

            about = patiently(lambda: HfApi().model_info(hub.id, revision=hub.revision, files_metadata=True))
    except LoadError:
        here = downloaded(hub)
        if here is None:
            raise
        return here.name, {file.relative_to(here).as_posix(): file.stat().st_size for file in files_in(here)}
    return about.sha or "main", {sibling.rfilename: sibling.size or 0 for sibling in about.siblings or []}


def files_in(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def read_part(hub: HubName, name: str, begin: int, end: int) -> bytes:
    """The bytes [begin, end) of a file. LoadError, also where the server would send all of it."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

    headers = build_hf_headers() | {"Range": f"bytes={begin}-{end - 1}"}
    url = hf_hub_url(hub.id, name, revision=hub.revision)
    with (
        readable_errors(hub.id),
        get_session().stream("GET", url, headers=headers, timeout=TIMEOUT) as answer,
    ):
        if answer.status_code >= 400:
            answer.read()
        hf_raise_for_status(answer)
        if answer.status_code != 206:
            raise LoadError(
                f"{hub.id}: the server sends no part of {name}: download the file, and give its path"
            )
        data: bytes = answer.read()
    if len(data) != end - begin:
        raise LoadError(
            f"{hub.id}: the server sent {len(data)} bytes of {name} in the place of {end - begin}: try again"
        )
    return data


_SHA256 = re.compile(r"[0-9a-f]{64}")  # the name of a file of weights in the cache


def check_hashes(downloaded: Path) -> int:
    """Compare every weight file of a snapshot, or one file of it, with its name; how many were compared.

    A file that differs is removed, so that the next download fetches it again. Raises LoadError.
    """
    count = 0
    for path in [downloaded] if downloaded.is_file() else files_in(downloaded):
        blob = path.resolve()
        if not path.is_symlink() or not _SHA256.fullmatch(blob.name):
            continue  # a small file, or a cache without links: its name says nothing
        with blob.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != blob.name:
            blob.unlink()
            path.unlink()
            raise LoadError(f"{path.name} was damaged on its way (SHA-256 {digest[:12]}…): download it again")
        count += 1
    return count
