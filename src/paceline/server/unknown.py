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

# fields of other servers that would change the text, with a value of each that would not, or a tuple of such values
_CHANGES_TEXT: dict[str, Any] = {
    # samplers
    "samplers": [], "sampler_order": [], "sampler_seq": "", "sampler_priority": [],
    "tfs_z": 1, "tfs": 1, "top_a": 0, "top_h": None, "smoothing_factor": 0, "smoothing_curve": 1, "epsilon_cutoff": 0,
    "eta_cutoff": 0, "adaptive_target": -1, "skew": 0, "min_keep": (0, 1), "dynamic_temperature": False, "min_temp": 1,
    "max_temp": 1, "top_p_min": 0, "top_p_decay": 0, "top_p_reset_ids": [], "do_sample": True,
    # penalties
    "no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1, "encoder_no_repeat_ngram_size": 0, "rep_pen_slope": 0,
    "repetition_decay": 0, "penalize_nl": False, "penalize_newline": False, "repetition_detection": None,
    "prompt_ignore_length": 0, "exponential_decay_length_penalty": None,
    # searches and other models
    "guidance_scale": 1, "cfg_scale": 1, "negative_prompt": "", "penalty_alpha": 0, "use_beam_search": False,
    "num_beams": 1, "num_beam_groups": 1, "beam_width": 1, "beam_search_diversity_rate": 0, "length_penalty": 1,
    "diversity_penalty": 0, "early_stopping": False, "best_of_beams": 1, "constraints": None, "dola_layers": None,
    "lora_request": None, "lora_path": None, "adapter_id": None, "adapters": None, "watermark": False,
    "watermarking_config": None, "custom_logit_processor": None, "custom_params": None, "vllm_xargs": None,
    # what may be written
    "bad_words_ids": [], "bad_words_list": [], "force_words_ids": [], "custom_token_bans": "", "logits_processors": [],
    "embedding_bias": [], "sequence_bias": None, "begin_suppress_tokens": [], "structural_tag": None,
    "guided_decoding_params": None, "grammar_lazy": False, "grammar_triggers": [], "ban_eos_token": False,
    "bypass_eos": False, "use_default_badwordsids": False, "forced_bos_token_id": None, "forced_eos_token_id": None,
    # where it ends
    "stop_regex": [], "n_indent": 0, "t_max_predict_ms": 0, "max_time": 0, "max_tokens_second": 0, "min_length": 0,
    "auto_max_new_tokens": False, "thinking_budget": -1, "thinking_token_budget": -1, "thinking_budget_tokens": -1,
    "reasoning_budget": -1,
    # the prompt
    "truncate_prompt_tokens": 0, "truncation_strategy": "auto", "truncate": 0, "prompt_truncate_len": 0,
    "token_healing": False, "add_bos_token": True, "add_special_tokens": True, "prompt_embeds": [], "documents": [],
    "chat_template": None, "template": "", "context": [], "instruction_template": None, "instruction_template_str": None,
    "chat_template_str": None, "character": None, "preset": None, "role_mapping": None, "safe_prompt": False,
    "memory": "", "image_data": [], "session_params": None, "prompt_mode": None,
    # the web
    "web_search_options": None, "search_parameters": None, "search_settings": None, "enable_search": False,
    "plugins": [], "mcp_servers": [], "container": None,
    # how it is shown
    "spaces_between_special_tokens": True, "detokenize": True, "render_special": False, "parse_tool_calls": True,
    "separate_reasoning": True, "include_reasoning": True, "reasoning_format": ("auto", "deepseek", "parsed"),
    "response_role": "assistant", "echo": False, "return_full_text": False, "trim_stop": True,
    "translation_options": None,
}  # fmt: skip
# and such that have another name here
_CALLED = {
    "random_seed": "seed", "sampling_seed": "seed", "sampler_seed": "seed", "stop_sequences": "stop",
    "stop_sequence": "stop", "stop_strings": "stop", "stop_words_list": "stop", "end_id": "stop_token_ids",
    "eos_token_id": "stop_token_ids", "no_stop_trim": "include_stop_str_in_output", "rep_pen": "repetition_penalty",
    "rep_pen_range": "penalty_last_n", "penalty_range": "penalty_last_n", "repetition_context_size": "penalty_last_n",
    "typical": "typical_p", "allowed_tokens": "allowed_token_ids", "regex_pattern": "regex", "grammar_string": "grammar",
    "dynatemp_low": "dynatemp_range", "dynatemp_high": "dynatemp_range", "temp": "temperature",
    "temp_exponent": "dynatemp_exponent", "num_return_sequences": "n",
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
    if getattr(body, "skip_special_tokens", None) is False:
        raise refuse(
            "skip_special_tokens",
            "special tokens are not shown as text here: leave it out, logprobs has every token of an answer",
        )
    inner = getattr(body, "options", None)  # Ollama's
    for prefix, part in (("", body), ("options.", inner)):
        for name, value in ((part.model_extra or {}) if isinstance(part, BaseModel) else {}).items():
            if name in _CALLED and value is not None:
                raise refuse(f"{prefix}{name}", f"is called {_CALLED[name]} here: use that name")
            if name in _CHANGES_TEXT and value is not None and not _is_off(value, _CHANGES_TEXT[name]):
                raise refuse(
                    f"{prefix}{name}", "is not supported here and would change the text: leave it out"
                )


def _is_off(value: Any, off: Any) -> bool:
    """Whether a value switches its field off."""
    if isinstance(off, tuple):
        return value in off
    return value == off or (off in _OFF and value in _OFF)


def _ignored(body: Named, no_effect: Iterable[str]) -> Iterator[tuple[Place, str]]:
    for place in _extra(body, ()):
        yield place, "is unknown here"
    for name in no_effect:
        if getattr(body, name, None) is not None:
            yield (name,), "has no effect here"


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
