"""Pictures of a request -> soft tokens in its prompt: decoded, encoded by the tower once, and kept by content."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from paceline.errors import PromptError
from paceline.media.decoder import Decoder
from paceline.media.pixels import VERSION, Cut, soft_tokens
from paceline.media.sound import prepared
from paceline.media.sources import of_any
from paceline.media.talk import MediaItem, Talk
from paceline.models.towers.base import BUDGETS, AudioTower, VisionTower
from paceline.soft_tokens import Kind, MediaPrompt, SoftTokens, Spent
from paceline.text.tokenizer import Tokenizer
from paceline.turns import Turns

KEPT_BYTES = 256 * 2**20  # of soft tokens of earlier requests
MOST_ITEMS: Mapping[Kind, int] = {"image": 16, "audio": 4}  # in a request


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """The ids that stand around and for media of one kind."""

    placeholder: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class _Ready:
    """An item whose soft tokens are known in number."""

    item: MediaItem
    key: int
    count: int
    encode: Callable[[], torch.Tensor]  # computes them, or gives those that are known
    together: bool = False
    known: bool = False
    decoding: float = 0.0  # seconds


class _File(NamedTuple):
    """A file that was sent. Clients that do not share a cache have salts of their own."""

    salt: str
    digest: bytes  # SHA-256
    budget: int  # of soft tokens, -1: there is none


class _Place(NamedTuple):
    """Where soft tokens are kept."""

    salt: str
    key: int  # of the content


class TooLong(PromptError):
    """The context does not hold the prompt."""


class MediaReader:
    """What a loaded model can see. Safe to use from several threads; the tower works for one at a time."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tokens: Mapping[Kind, MediaTokens],
        vision: Callable[[], VisionTower] | str,
        audio: Callable[[], AudioTower] | str,
        default: int = 280,
        max_len: int | None = None,
    ) -> None:
        """`vision`, `audio`: what loads a tower at its first use, or why there is none. `default`: soft tokens of a
        picture. `max_len`: tokens of a text at most."""
        self.tokenizer, self.tokens, self.default, self.max_len = tokenizer, tokens, default, max_len
        self._load_vision, self._load_audio, self._decoder, self.turns = vision, audio, Decoder(), Turns()
        self._threads = torch.get_num_threads()
        self._seeing: VisionTower | None = None
        self._listening: AudioTower | None = None
        self._lock, self._loading, self._working = threading.Lock(), threading.Lock(), threading.Lock()
        self._store: OrderedDict[_Place, torch.Tensor] = OrderedDict()
        self._known: dict[_File, int] = {}  # the key of its content
        self._texts = {kind: tokenizer.token_text(ids.placeholder) for kind, ids in tokens.items()}

    @property
    def placeholders(self) -> list[str]:
        """Every text that is one of the special tokens, which nobody may type."""
        ids = {i for marks in self.tokens.values() for i in (marks.placeholder, marks.begin, marks.end)}
        return [self.tokenizer.token_text(i) for i in ids]

    def why_not(self, kind: Kind) -> str | None:
        """Why media of a kind cannot be read; None if they can."""
        tower = self._load_vision if kind == "image" else self._load_audio
        return tower if isinstance(tower, str) else None

    def load(self) -> None:
        """Load the towers now, not with the first picture or clip. Raises LoadError."""
        for kind in self.tokens:
            if self.why_not(kind) is None:
                self.vision() if kind == "image" else self._hearing()

    def vision(self) -> VisionTower:
        """Loaded at the first use."""
        with self._loading:
            if self._seeing is None and callable(self._load_vision):
                self._seeing = self._load_vision()
            assert self._seeing is not None, "`why_not` is asked before"
            return self._seeing

    def _hearing(self) -> AudioTower:
        with self._loading:
            if self._listening is None and callable(self._load_audio):
                self._listening = self._load_audio()
            assert self._listening is not None, "`why_not` is asked before"
            return self._listening

    def prompt(self, text: str, talk: Talk, salt: str = "", *, add_bos: bool | None = False) -> MediaPrompt:
        """The prompt of a rendered text with one placeholder for each item of `talk`, in order. Raises PromptError."""
        kinds, pieces = self._split(text)
        self._compare(kinds, talk.items)
        ready = [self._prepare(item, salt) for item in talk.items]
        expanded = pieces[0]
        for ready_item, piece in zip(ready, pieces[1:], strict=True):
            expanded += self._run_text(ready_item.item.kind, ready_item.count) + piece
        ids = self._encode(expanded, talk.marks, add_bos)
        _check_room(len(ids), ready, self.max_len)
        return MediaPrompt(ids, self._placed(ids, ready, salt))

    def measured(self, text: str, talk: Talk, *, add_bos: bool | None = False) -> list[int]:
        """The ids of such a prompt, by the headers of its pictures: no tower runs. Raises PromptError."""
        kinds, pieces = self._split(text)
        self._compare(kinds, talk.items)
        expanded = pieces[0]
        for item, piece in zip(talk.items, pieces[1:], strict=True):
            expanded += self._run_text(item.kind, self.count(item)) + piece
        return self._encode(expanded, talk.marks, add_bos)

    def in_order(self, text: str, given: Mapping[Kind, Seq[Any]]) -> list[MediaItem]:
        """What is given for a prompt's placeholders, in their order; what has none comes last."""
        left = {kind: [MediaItem(kind, source, f"{kind}[{i}]") for i, source in enumerate(some)]
                for kind, some in given.items()}  # fmt: skip
        items = [left[kind].pop(0) for kind in self._split(text)[0] if left.get(kind)]
        return [*items, *(item for rest in left.values() for item in rest)]

    def count(self, item: MediaItem) -> int:
        """Soft tokens of an item; of a picture by its header alone. Raises PromptError."""
        if item.kind == "audio":
            return self._prepare(item, "").count
        if (why := self.why_not("image")) is not None:
            raise PromptError(why)
        return soft_tokens(
            self._decoder.size(of_any(item.source, item.where or "the picture")),
            self._cut(item, self.vision()),
        )

    # -- text ----------------------------------------------------------------------------------------------------

    def _split(self, text: str) -> tuple[list[Kind], list[str]]:
        """Kinds of the placeholders of a text, and what stands around them."""
        by_text = {shown: kind for kind, shown in self._texts.items()}
        parts = re.split("(" + "|".join(re.escape(shown) for shown in by_text) + ")", text)
        return [by_text[part] for part in parts[1::2]], parts[::2]

    def _compare(self, kinds: Seq[Kind], items: Seq[MediaItem]) -> None:
        """Raise PromptError unless there is a placeholder for each item, and no other."""
        for kind in self._texts:
            wanted = [item for item in items if item.kind == kind]
            count = sum(placed == kind for placed in kinds)
            if len(wanted) > MOST_ITEMS[kind]:
                raise PromptError(
                    f"{len(wanted)} parts of type {kind}, at most {MOST_ITEMS[kind]} are read: send fewer"
                )
            if count < len(wanted) and wanted[-1].where:
                raise PromptError(
                    f"{wanted[count].where}: the chat template does not show this {kind}: put it into a user's message"
                )
            if count != len(wanted):
                raise PromptError(
                    f"the prompt has {count} of {self._texts[kind]} and {len(wanted)} parts of type {kind} were given: "
                    "give one for each"
                )
        if list(kinds) != [item.kind for item in items]:
            raise PromptError(
                "the placeholders stand in another order than the parts: give them in the prompt's order"
            )

    def _run_text(self, kind: Kind, count: int) -> str:
        ids, show = self.tokens[kind], self.tokenizer.token_text
        return show(ids.begin) + show(ids.placeholder) * count + show(ids.end)

    def _encode(self, text: str, marks: Mapping[str, str], add_bos: bool | None) -> list[int]:
        """Ids of a text; what stands for typed placeholders is cut in two, so that it is characters."""
        if not marks:
            return self.tokenizer.encode(text, add_bos=add_bos)
        parts = re.split("(" + "|".join(re.escape(mark) for mark in marks) + ")", text)
        pieces = [parts[0]]
        for mark, after in zip(parts[1::2], parts[2::2], strict=True):
            pieces[-1] += marks[mark][:1]
            pieces.append(marks[mark][1:] + after)
        ids = self.tokenizer.encode(pieces[0], add_bos=add_bos)
        return ids + [token for piece in pieces[1:] for token in self.tokenizer.encode(piece, add_bos=False)]

    def _placed(self, ids: list[int], ready: Seq[_Ready], salt: str) -> list[SoftTokens]:
        """The soft tokens of each item, where its run stands in `ids`."""
        media, at = list[SoftTokens](), 0
        for item in ready:
            token = self.tokens[item.item.kind].placeholder
            start = ids.index(token, at)
            at = start + item.count
            begin = time.perf_counter()
            vectors, known = self._vectors(item, salt)
            spent = Spent(item.decoding, 0.0 if known else time.perf_counter() - begin, known)
            if ids[start:at] != [token] * item.count or len(vectors) != item.count:
                raise PromptError(
                    f"{item.item.where or 'the picture'}: its soft tokens do not fit its placeholders"
                )
            media.append(SoftTokens(item.item.kind, start, vectors, item.key, item.together, spent))
        return media

    # -- content -------------------------------------------------------------------------------------------------

    def _cut(self, item: MediaItem, tower: VisionTower) -> Cut:
        budget = self.default if item.budget is None else item.budget
        if budget not in BUDGETS:
            raise PromptError(f"a picture has a budget of {', '.join(map(str, BUDGETS))} soft tokens")
        return Cut(budget, tower.grid.patch, tower.grid.pooling)

    def _prepare(self, item: MediaItem, salt: str) -> _Ready:
        if (why := self.why_not(item.kind)) is not None:
            raise PromptError(f"{item.where}: {why}" if item.where else why)
        try:
            begin = time.perf_counter()
            ready = self._picture(item, salt) if item.kind == "image" else self._sound(item, salt)
            return replace(ready, decoding=time.perf_counter() - begin)
        except PromptError as error:
            reason = str(error)
            raise PromptError(f"{item.where}: {reason}" if item.where not in reason else reason) from error

    def _picture(self, item: MediaItem, salt: str) -> _Ready:
        tower = self.vision()
        cut = self._cut(item, tower)
        data = of_any(item.source, item.where or "the picture")
        file = _File(salt, hashlib.sha256(data).digest(), cut.budget)
        known = self._remembered(item, file, tower.together)
        if known is not None:
            return known
        pixels = self._decoder.pixels(data, cut)
        key = content_key(f"image {cut.budget} {pixels.height} {pixels.width} ", pixels.rgb)
        with self._lock:
            self._known[file] = key
        values = torch.frombuffer(bytearray(pixels.rgb), dtype=torch.uint8)
        values = values.view(pixels.height, pixels.width, 3)
        count = (pixels.height // cut.side) * (pixels.width // cut.side)
        return _Ready(item, key, count, lambda: self.turns.run(tower.slices(values)), tower.together)

    def _remembered(self, item: MediaItem, file: _File, together: bool) -> _Ready | None:
        """An item by its file alone, if its soft tokens are kept: nothing is decoded."""
        with self._lock:
            key = self._known.get(file, -1)
            place = _Place(file.salt, key)
            known = self._store.get(place)
            if known is None:
                return None
            self._store.move_to_end(place)
        return _Ready(item, key, len(known), lambda: known, together, True)

    def _sound(self, item: MediaItem, salt: str) -> _Ready:
        tower, file = self._hearing(), None
        if isinstance(item.source, tuple | list) and len(item.source) == 2:  # samples and their rate
            samples = prepared(*item.source)
        else:
            data = of_any(item.source, item.where or "the sound")
            file = _File(salt, hashlib.sha256(data).digest(), -1)
            known = self._remembered(item, file, False)
            if known is not None:
                return known
            samples = self._decoder.samples(data)
        count = tower.count(len(samples))
        if not count:
            raise PromptError(
                f"the sound has {len(samples)} samples at 16 kHz, too few to hear: send a longer one"
            )
        key = content_key(f"audio {len(samples)} ", samples.tobytes())
        if file is not None:
            with self._lock:
                self._known[file] = key
        return _Ready(item, key, count, lambda: self.turns.run(tower.slices(samples)))

    def _vectors(self, item: _Ready, salt: str) -> tuple[torch.Tensor, bool]:
        """(the soft tokens of an item, whether the store had them): else the tower computes them."""
        if item.known:
            return item.encode(), True
        with self._working:  # one at a time, first come, first served
            torch.set_num_threads(self._threads)  # one that began during a step has only itself
            with self._lock:
                known = self._store.get(_Place(salt, item.key))
            vectors = item.encode() if known is None else known
        if not bool(torch.isfinite(vectors).all()):
            raise PromptError(f"{item.item.where or item.item.kind}: the tower gives no numbers (NaN) for it")
        with self._lock:
            self._keep(_Place(salt, item.key), vectors)
        return vectors, known is not None

    def _keep(self, place: _Place, vectors: torch.Tensor) -> None:
        self._store[place] = vectors
        while sum(stored.nbytes for stored in self._store.values()) > KEPT_BYTES and len(self._store) > 1:
            self._store.popitem(last=False)
        if len(self._known) > 4096:
            self._known.clear()


def _check_room(count: int, ready: Seq[_Ready], most: int | None) -> None:
    """Raise TooLong for a prompt of `count` tokens that a context of `most` does not hold, before any tower runs."""
    if most is None or count < most:
        return
    images = [item.count for item in ready if item.item.kind == "image"]
    rest = count - sum(images)
    fitting = [budget for budget in BUDGETS if rest + budget * len(images) < most]
    hint = f"a budget of {fitting[-1]} would fit" if images and fitting else "send fewer or shorter ones"
    raise TooLong(
        f"the prompt has {count} tokens, {rest} beside its pictures of {' + '.join(map(str, images)) or 'none'}, and the "
        f"context holds {most}, of which one must be left to write: {hint}"
    )


def content_key(head: str, content: bytes) -> int:
    """What tells contents apart: their bytes, what they are, and the version of what made them."""
    digest = hashlib.sha256(f"{VERSION} {head}".encode() + content).digest()
    return int.from_bytes(digest, "big")
