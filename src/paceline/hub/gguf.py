"""GGUF files of a hub repository: which one a tag like `Q4_K_M` means, its header without its weights, its download."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from paceline.checkpoints.gguf.metadata import check_architecture
from paceline.checkpoints.gguf.names import DERIVED
from paceline.checkpoints.gguf.reader import SPLIT, Gguf, header, is_gguf
from paceline.errors import LoadError, WeightsError
from paceline.hub.names import DRAFTER_FILE, HubName, models_among
from paceline.hub.repository import listing, patiently, read_part, readable_errors

LABEL = re.compile(
    r"(?<![A-Z0-9])(UD-)?(I?Q\d_\w+|TQ\d_\d|BF16|FP?16|FP?32|(MX|NV)FP4\w*)(?![A-Z0-9])", re.IGNORECASE
)
TOWERS_FILE = re.compile(r"(^|[-_.])mmproj[-_.]", re.IGNORECASE)
TOWERS_PREFERRED = ("BF16", "F32", "F16", "Q8_0")
PREFERRED = ("Q4_K_M", "Q4_0", "Q8_0")  # where no tag is given
FIRST_PART, LARGEST_HEADER = 2**18, 2**27  # bytes; a vocabulary of 262,144 tokens and its merges has 16 MB
LARGEST_FACTORS = 2**16  # bytes of what says how rotary embeddings are scaled


def choose(hub: HubName, names: Iterable[str]) -> list[str]:
    """The files of the model that `hub` means among those of its repository, of a split one all parts in order.

    A tag is the kind of the weights as file names carry it, in any case, or the name of a file. Without one it is the
    only model, else the first kind of PREFERRED. Raises LoadError with the tags that are there.
    """
    names = list(names)
    tagged: dict[str, list[str]] = {}
    for name in models_among(names):
        tagged.setdefault(tag_of(name), []).append(name)
    tags = ", ".join(sorted(tagged))
    if not tagged:
        raise LoadError(
            f"{hub.id} has no GGUF file: give it without :{hub.tag}, or a repository that has some"
        )
    if hub.tag is None:
        tag = next((tag for tag in PREFERRED if tag in tagged), None)
        tag = tag or (next(iter(tagged)) if len(tagged) == 1 else None)
        if tag is None:
            raise LoadError(f"{hub.id} has GGUF files of several kinds: give {hub.id}:TAG, TAG one of {tags}")
        files = tagged[tag]
    else:
        tag = hub.tag.upper()
        named = [name for name in names if is_gguf(Path(name)) and hub.tag.lower() in _spellings(name)]
        files = tagged.get(tag) or tagged.get(f"UD-{tag}") or named[:1]
    if not files:
        raise LoadError(f"{hub.id} has no GGUF file tagged {hub.tag}: give one of {tags}")
    if len(files) > 1:
        some = ", ".join(PurePosixPath(name).name for name in files)
        raise LoadError(
            f"{hub.id} has {len(files)} GGUF files tagged {tag}: give {hub.id}:FILE, FILE one of {some}"
        )
    return _parts(hub, files[0], names)


def drafter_of(hub: HubName) -> str | None:
    """The name of the drafter's file that lies beside the models of a repository, Q8_0 where there are several."""
    names = [n for n in listing(hub)[1] if is_gguf(Path(n)) and DRAFTER_FILE.search(PurePosixPath(n).name)]
    first = min(names, key=lambda name: (tag_of(name) != "Q8_0", name), default=None)
    at = "" if hub.revision is None else f"@{hub.revision}"
    return None if first is None else f"{hub.id}{at}:{PurePosixPath(first).name}"


def towers_of(hub: HubName) -> str | None:
    """The name of the mmproj file that lies beside the models of a repository: of several the most exact as stored."""
    names = [n for n in listing(hub)[1] if is_gguf(Path(n)) and TOWERS_FILE.search(PurePosixPath(n).name)]
    rank = {kind: i for i, kind in enumerate(TOWERS_PREFERRED)}
    first = min(names, key=lambda name: (rank.get(tag_of(name), len(rank)), name), default=None)
    at = "" if hub.revision is None else f"@{hub.revision}"
    return None if first is None else f"{hub.id}{at}:{PurePosixPath(first).name}"


def tag_of(name: str) -> str:
    """The kind of a file's weights by its name, in capitals; the whole name where it says none."""
    stem = PurePosixPath(name).name
    labels = list(LABEL.finditer(stem))
    return labels[-1][0].upper() if labels else stem


def _spellings(name: str) -> tuple[str, ...]:
    file = PurePosixPath(name).name.lower()
    return file, file.removesuffix(".gguf")


def _parts(hub: HubName, name: str, names: list[str]) -> list[str]:
    match = SPLIT.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    parts = [f"{match['stem']}-{i:05d}-of-{match['count']}{match['end']}" for i in range(1, count + 1)]
    missing = next((part for part in parts if part not in names), None)
    if missing is not None:
        raise LoadError(
            f"{hub.id} lacks {missing}, a part of {name}: give another file of it, or report it there"
        )
    return parts


def outline_gguf(hub: HubName, sizes: Mapping[str, int], place: Path) -> Path:
    """Files under `place` that have the headers of a model's files, and holes where its weights are; the first one.

    A header has to be read up to its end, past the vocabulary. It is read in parts, so that what cannot be run is
    refused by the first. Raises LoadError.
    """
    files = {place / PurePosixPath(name).name: name for name in choose(hub, sizes)}
    for path, name in files.items():
        _fetch_header(hub, name, sizes[name], path)
    first = next(iter(files))
    for tensor in Gguf(first).tensors.values():
        if DERIVED.fullmatch(tensor.name) and tensor.nbytes <= LARGEST_FACTORS:  # the config is read from it
            end = tensor.offset + tensor.nbytes
            _put(tensor.file, tensor.offset, read_part(hub, files[tensor.file], tensor.offset, end))
    return first


def _fetch_header(hub: HubName, name: str, size: int, path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(size)
    have, whole = 0, False
    while not whole:
        if have >= min(size, LARGEST_HEADER):
            raise WeightsError(f"{path}: its header is no header of a model: report it to its makers")
        part = read_part(hub, name, have, min(max(FIRST_PART, 2 * have), size))
        _put(path, have, part)
        have += len(part)
        whole, length = header(path, have)
        if "general.architecture" in length:
            check_architecture(path, length)


def _put(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def download_gguf(hub: HubName) -> Path:
    """The first file of the model, in the hub cache; what is not there is fetched with a progress bar. LoadError."""
    from huggingface_hub import snapshot_download

    files = choose(hub, listing(hub)[1])
    with readable_errors(hub.id):
        names = [glob.escape(name) for name in files]  # they are taken as patterns
        folder = Path(
            patiently(lambda: snapshot_download(hub.id, revision=hub.revision, allow_patterns=names))
        )
    return folder / files[0]
