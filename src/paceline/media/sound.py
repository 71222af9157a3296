"""A sound file -> samples as a model hears them: 16 kHz, one channel, float32 in [-1, 1].

Plain WAV is read here; other formats by soundfile (libsndfile), which is imported where one is, not before.
"""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import PromptError

RATE = 16_000  # samples a second
MOST_SECONDS = 30
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE  # formats of WAV files
_CROSSINGS, _ROLLOFF = 6, 0.99  # of the resampling filter, as torchaudio's
Samples = NDArray[np.float32]


def read_samples(data: bytes) -> Samples:
    """Decode, mix and resample a sound file. Raises PromptError for what is none, or too long."""
    if not data:
        raise PromptError("the sound is empty: send the bytes of a file")
    is_wav = data[:4] == b"RIFF" and data[8:12] == b"WAVE"
    channels, rate = _read_wav(data) if is_wav else _read_other(data)
    return prepared(channels, rate)


def prepared(samples: Any, rate: int) -> Samples:
    """Samples [n] or [n, channels] in [-1, 1] at any rate, as a model hears them. Raises PromptError."""
    values = np.asarray(samples, dtype=np.float32)
    if values.ndim not in (1, 2) or not values.size:
        raise PromptError("the sound has no samples [n] or [n, channels]: give some")
    if isinstance(rate, bool) or not 1000 <= rate <= 768_000:
        raise PromptError("the sound has an impossible sample rate: 8000 to 192000 a second are usual")
    if len(values) > MOST_SECONDS * rate:
        raise PromptError(
            f"the sound has {len(values) / rate:.1f} seconds and {MOST_SECONDS} are read at once: split it"
        )
    if not bool(np.isfinite(values).all()):
        raise PromptError("the sound has samples that are no numbers: save it again")
    mono = values if values.ndim == 1 else values.mean(axis=1, dtype=np.float32)
    return resampled(mono, rate, RATE)[: MOST_SECONDS * RATE]


def resampled(x: Samples, source: int, wanted: int) -> Samples:
    """Band-limited: a sinc with 6 zero crossings to a side under a squared cosine, in double precision."""
    if source == wanted:
        return np.ascontiguousarray(x)
    common = math.gcd(source, wanted)
    down, up = source // common, wanted // common
    cut = min(source, wanted) / source * _ROLLOFF  # of the source's band
    wide = math.ceil(_CROSSINGS / cut)
    count = -(-len(x) * up // down)
    out = np.zeros(count, np.float32)
    padded = np.concatenate((np.zeros(wide), x, np.zeros(wide + down + 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * wide + 1)
    for phase in range(min(up, count)):
        base, part = divmod(phase * down, up)
        t = (np.arange(-wide, wide + 1) - part / up) * cut
        kernel = np.sinc(t) * np.cos(np.clip(t / _CROSSINGS, -1, 1) * np.pi / 2) ** 2 * cut
        places = base + down * np.arange(-(-(count - phase) // up))
        out[phase::up] = windows[places] @ kernel
    return out


def _read_wav(data: bytes) -> tuple[Samples, int]:
    """(samples [n, channels], rate) of 8 to 32 bits, whole or floating. Raises PromptError."""
    form, body = b"", b""
    at = 12
    while at + 8 <= len(data):
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if name == b"fmt ":
            form = data[at + 8 : at + 8 + size]
        elif name == b"data":
            body = data[at + 8 : at + 8 + size]  # a stream says a size that is too large
            break
        at += 8 + size + size % 2
    if len(form) < 16:
        raise PromptError("the WAV file has no format: save it again")
    kind, channels, rate = (int.from_bytes(form[i:j], "little") for i, j in ((0, 2), (2, 4), (4, 8)))
    bits = int.from_bytes(form[14:16], "little")
    if kind == _EXTENSIBLE and len(form) >= 26:
        kind = int.from_bytes(form[24:26], "little")
    if not 1 <= channels <= 32 or (kind, bits) not in {(_PCM, b) for b in (8, 16, 24, 32)} | {
        (_FLOAT, 32),
        (_FLOAT, 64),
    }:
        raise PromptError(
            f"a WAV file of format {kind} with {bits} bits and {channels} channels is not read: save it as 16 bits"
        )
    whole = len(body) // (channels * bits // 8) * channels * bits // 8
    return _numbers(body[:whole], kind, bits).reshape(-1, channels), rate


def _numbers(body: bytes, kind: int, bits: int) -> Samples:
    if kind == _FLOAT:
        return np.frombuffer(body, np.dtype(f"<f{bits // 8}")).astype(np.float32)
    if bits == 8:
        return (np.frombuffer(body, np.uint8).astype(np.float32) - np.float32(128)) / np.float32(128)
    if bits == 24:
        three = np.frombuffer(body, np.uint8).reshape(-1, 3)
        four = np.zeros((len(three), 4), np.uint8)
        four[:, 1:] = three
        return (four.view("<i4")[:, 0] / 2.0**31).astype(np.float32)
    wide = np.frombuffer(body, np.dtype(f"<i{bits // 8}")) / 2.0 ** (bits - 1)
    return np.asarray(wide, np.float32)


def _read_other(data: bytes) -> tuple[Samples, int]:
    try:
        import soundfile  # type: ignore[import-untyped]
    except (ImportError, OSError) as error:  # the library itself may be missing
        raise PromptError("sound that is no WAV needs soundfile: pip install 'paceline[media]'") from error
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if file.frames > MOST_SECONDS * file.samplerate:
                raise PromptError(
                    f"the sound has {file.frames / file.samplerate:.1f} seconds and {MOST_SECONDS} are read at once: "
                    "split it"
                )
            return file.read(dtype="float32", always_2d=True), int(file.samplerate)
    except (soundfile.SoundFileError, RuntimeError, ValueError, TypeError) as error:
        raise PromptError("the file is no sound of a known kind: send WAV, FLAC, OGG or MP3") from error
