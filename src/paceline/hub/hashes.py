"""Whether a download is what the hub meant: files of weights in its cache are named by the SHA-256 of what they hold."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from paceline.errors import LoadError
from paceline.hub.repository import files_in

_SHA256 = re.compile(r"[0-9a-f]{64}")


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
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != blob.name:
            blob.unlink()
            path.unlink()
            raise LoadError(f"{path.name} was damaged on its way (SHA-256 {found[:12]}…): download it again")
        count += 1
    return count
