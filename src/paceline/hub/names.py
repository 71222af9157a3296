"""What a user names -> what it is: a path, or a repository of the Hugging Face hub. Nothing is read from the network."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from paceline.checkpoints.foreign import explain_folder
from paceline.checkpoints.gguf.reader import is_gguf
from paceline.drafter_kinds import KINDS
from paceline.errors import LoadError, UsageError
from paceline.files import check_file

HUB_ID = re.compile(
    r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?(:(?P<tag>[\w.-]+))?"
)
_HOSTS = re.compile(
    r"(https?://)?(www\.)?(huggingface\.co|hf\.co|hf-mirror\.com)/(?P<rest>.*)", re.IGNORECASE
)
_SCHEME = re.compile(r"[A-Za-z][\w+.-]*://")
CACHE_PREFIX = "models--"
# GGUF files of what sees pictures and of statistics for quantizing, and the later parts of a split model
_NO_MODEL = re.compile(r"(^|[-_./])(mmproj|imatrix)|-(?!00001)\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
# GGUF files of assistants beside their target
_DRAFTER_WORDS = "|".join(word for kind in KINDS.values() for word in kind.files)
DRAFTER_FILE = re.compile(rf"(^|[-_.])({_DRAFTER_WORDS})[-_.]", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository `id` = org/name, at a revision (None: main). `tag` picks one file of a GGUF repository."""

    id: str
    revision: str | None = None
    tag: str | None = None


def parse_hub(text: str) -> HubName | None:
    """`org/name[@revision][:tag]` or a page of the hub; None for anything else. UsageError for another web address."""
    address = _HOSTS.fullmatch(text)
    if address is None and text.startswith("hf://"):
        address = _HOSTS.fullmatch("hf.co/" + text.removeprefix("hf://").removeprefix("models/"))
    if address is not None:
        return _from_page(address["rest"], text)
    if _SCHEME.match(text):
        raise UsageError(
            f"{text} is an address that paceline cannot load from: give a folder or a hub id org/name"
        )
    match = HUB_ID.fullmatch(text)
    return None if match is None else HubName(match["id"], match["revision"], match["tag"])


def _from_page(rest: str, text: str) -> HubName:
    parts = [unquote(part) for part in re.split(r"[?#]", rest)[0].split("/") if part]
    match = HUB_ID.fullmatch("/".join(parts[:2]))
    if match is None or parts[0] in ("datasets", "spaces"):
        raise UsageError(f"{text} is no page of a model: give huggingface.co/org/name, or org/name")
    revision, tag = match["revision"], match["tag"]
    if len(parts) > 3 and parts[2] in ("tree", "blob", "resolve"):
        revision = parts[3]
        if is_gguf(Path(parts[-1])):
            tag = parts[-1]
    return HubName(match["id"], None if revision == "main" else revision, tag)


def local_path(text: str) -> Path | None:
    """The absolute path of something that exists under the name `text`, None if nothing does.

    Links are kept, because what lies beside a link belongs to it; `..` is taken as the system takes it.
    """
    if not text.strip() or "\0" in text:
        return None
    expanded = os.path.expanduser(text)
    if not os.path.lexists(expanded):
        return None
    if not os.path.exists(expanded):
        raise UsageError(f"{text} is a link that leads nowhere: give the folder it should lead to")
    path = Path(os.path.abspath(expanded))
    return Path(os.path.realpath(expanded)) if ".." in Path(expanded).parts else path


def open_folder(folder: Path) -> Path:
    """The folder that holds the model: itself, or the newest snapshot of a hub cache's `models--org--name`.

    Raises LoadError for one that may not be entered.
    """
    if not os.access(folder, os.X_OK):
        raise LoadError(f"cannot read {folder} (Permission denied): change its permissions")
    snapshots = folder if folder.name == "snapshots" else folder / "snapshots"
    repository = snapshots.parent
    if repository.name.startswith(CACHE_PREFIX) and not (folder / "config.json").exists() and folder in (
        snapshots, repository,
    ):  # fmt: skip
        return _snapshot_of(repository)
    return _gguf_in(folder) or folder


def _gguf_in(folder: Path) -> Path | None:
    """The one GGUF model of a folder that has no config.json; None where there is none. UsageError for several.

    If only one shard is there, return it; the loader reports what is missing.
    """
    if (folder / "config.json").exists():
        return None
    files = gguf_files(folder)
    models = models_among(path.name for path in files)
    if len(models) > 1:
        raise UsageError(
            f"{folder} holds {len(models)} GGUF models ({models[0]}, {models[1]}, ...): give the path of one"
        )
    return folder / models[0] if models else next(iter(files), None)


def gguf_files(folder: Path) -> list[Path]:
    """The GGUF files of a folder by name; none where it cannot be read."""
    try:
        return sorted(path for path in folder.iterdir() if is_gguf(path))
    except OSError:
        return []


def models_among(names: Iterable[str]) -> list[str]:
    """Of the names of files those of GGUF models, of a split one its first part; a drafter only where nothing else is."""
    models = sorted(name for name in names if is_gguf(Path(name)) and not _NO_MODEL.search(name))
    return [name for name in models if not DRAFTER_FILE.search(PurePosixPath(name).name)] or models


def _snapshot_of(repository: Path) -> Path:
    """The snapshot that refs/main names, else the newest. LoadError where the download is not complete."""
    configs = sorted((repository / "snapshots").glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    if not configs:
        name = repository.name.removeprefix(CACHE_PREFIX).replace("--", "/")
        raise LoadError(
            f"{repository} has no complete snapshot: the download is not complete, run `hf download {name}`"
        )
    main = repository / "refs" / "main"
    wanted = main.read_text(encoding="ascii", errors="replace").strip() if main.is_file() else ""
    return next((path.parent for path in configs if path.parent.name == wanted), configs[-1].parent)


def explain_file(path: Path) -> str:
    """One line on a file that was given where a model folder is wanted."""
    try:
        check_file(path)
    except LoadError as error:
        return str(error)
    if is_gguf(path):
        return f"{path} is a GGUF file, which cannot be used here: give the model folder that holds it"
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"):
        return f"{path} is a pickle, which can run code when opened: give a folder with safetensors"
    return f"{path} is a file: give the model folder that holds it"


def check_folder(folder: Path) -> Path:
    """`folder`, if it has a config.json that is a file or is a GGUF file. LoadError with what it is instead."""
    if is_gguf(folder):
        return folder
    if not (folder / "config.json").exists() and not (folder / "config.json").is_symlink():
        raise LoadError(explain_folder(folder))
    check_file(folder / "config.json")
    return folder
