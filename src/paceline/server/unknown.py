"""What a request says that this server does not know, or does not do: said once in the log, and in the answer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel

from paceline.server.errors import ApiError
from paceline.server.params import refuse
from paceline.server.schema import Named, TemplateOptions

log = logging.getLogger(__name__)
_TOLD, _LOGGED, _SHOWN = 64, 1000, 80  # warnings of an answer; names in the log; characters of a name
_NO_EFFECT = ("keep_alive", "id_slot")

# fields of other servers that would change the text, with a value of each that would not
_CHANGES_TEXT: dict[str, Any] = {
    "samplers": [], "sampler_order": [], "sampler_seq": "", "sampler_priority": [],
    "tfs_z": 1, "tfs": 1, "top_a": 0, "smoothing_factor": 0, "epsilon_cutoff": 0, "eta_cutoff": 0,
    "adaptive_target": -1, "skew": 0, "no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1,
    "guidance_scale": 1, "cfg_scale": 1, "negative_prompt": "", "penalty_alpha": 0, "use_beam_search": False,
    "num_beams": 1, "length_penalty": 1, "diversity_penalty": 0, "best_of_beams": 1,
    "bad_words_ids": [], "custom_token_bans": "", "logits_processors": [],
    "truncate_prompt_tokens": 0, "truncation_strategy": "auto",
    "n_indent": 0, "t_max_predict_ms": 0, "lora_request": None, "adapter_id": None, "structural_tag": None,
    "token_healing": False, "ban_eos_token": False, "add_bos_token": True, "add_special_tokens": True,
    "spaces_between_special_tokens": True, "detokenize": True,
}  # fmt: skip
_OFF: tuple[Any, ...] = (None, False, 0, "", [], {})

Place = tuple[str | int, ...]


class Unknown:
    """`strict`: what would be warned of is an error. Used on the event loop only."""

    def __init__(self, strict: bool, keeps: bool = False) -> None:
        """`keeps`: models are unloaded, so that `keep_alive` has an effect."""
        self._strict = strict
        self._no_effect = [name for name in _NO_EFFECT if not (keeps and name == "keep_alive")]
        self._logged: set[str] = set()

    def warnings(self, body: Named) -> list[str]:
        """A sentence for each name in `body` that is ignored. Raises ApiError 400 if the server is strict."""
        values: dict[str, str] = {}
        _refuse_changes(body)
        for place, why in _ignored(body, self._no_effect):
            if self._strict:
                where = ".".join(str(part)[:_SHOWN] for part in place)
                raise refuse(where, f"{why}, and this server was started with --strict: leave it out")
            name = ".".join(str(part)[:_SHOWN] for part in place if isinstance(part, str))
            values.setdefault(name, why)
            if len(values) == _TOLD:
                break
        for name, why in values.items():
            self._log(name, f"request field {name!r} {why} and ignored")
        return [f"{name}: {why} and ignored" for name, why in values.items()]

    def left_out(self, values: dict[str, str]) -> list[str]:
        """A sentence for each field (-> why) that is left out. Raises ApiError 400 if the server is strict."""
        for place, why in values.items():
            if self._strict:
                raise refuse(place, f"{why}, and this server was started with --strict: leave it out")
            self._log(why, f"request field {place!r}: {why}")
        return [f"{place}: {why}" for place, why in values.items()][:_TOLD]

    def model(self, asked: str | None, served: tuple[str, ...], *, choice: bool = False) -> list[str]:
        """What to say of the model that a request names. Raises ApiError 404 if the server is strict, or if the name is a
        `choice` between texts."""
        if asked in served:
            return []
        if self._strict or (choice and asked):
            what = f"model {asked[:_SHOWN]!r} is not served here" if asked else "no model is named"
            message = f"{what}: use {' or '.join(map(repr, served))}"
            raise ApiError(404, message, param="model", code="model_not_found")
        if not asked:
            return []
        warning = f"model: {asked[:_SHOWN]!r} is not served here, {served[0]!r} answers"
        self._log(f"model {asked[:_SHOWN]}", warning)
        return [warning]

    def _log(self, name: str, message: str) -> None:
        if name not in self._logged and len(self._logged) < _LOGGED:
            self._logged.add(name)
            log.warning("%s (said once)", message)


def _refuse_changes(body: Named) -> None:
    """Raise ApiError 400 for a field that would change the text and is not known here."""
    inner = getattr(body, "options", None)  # Ollama's
    for prefix, part in (("", body), ("options.", inner)):
        for name, value in ((part.model_extra or {}) if isinstance(part, BaseModel) else {}).items():
            if name in _CHANGES_TEXT and value is not None and value != _CHANGES_TEXT[name]:
                if _CHANGES_TEXT[name] in _OFF and value in _OFF:
                    continue
                raise refuse(
                    f"{prefix}{name}", "is not supported here and would change the text: leave it out"
                )


def _ignored(body: Named, no_effect: Iterable[str]) -> Iterator[tuple[Place, str]]:
    for place in _extra(body, ()):
        yield place, "is unknown here"
    for name in no_effect:
        if getattr(body, name, None) is not None:
            yield (name,), "has no effect here"
    if getattr(body, "skip_special_tokens", None) is False:
        yield ("skip_special_tokens",), "has no effect here when false"


def _extra(value: Any, place: Place) -> Iterator[Place]:
    if isinstance(value, BaseModel):
        if not isinstance(value, TemplateOptions):  # those are the template's to know
            yield from ((*place, name) for name in value.model_extra or ())
        for name in type(value).model_fields:
            yield from _extra(getattr(value, name), (*place, name))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            if not isinstance(item, BaseModel):
                return  # a list of numbers or texts
            yield from _extra(item, (*place, i))
