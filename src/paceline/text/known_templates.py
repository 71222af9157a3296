"""Chat templates by the names that files have in their place, as llama.cpp knows them."""

from __future__ import annotations

_CHATML = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_LLAMA3 = """{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
_GEMMA = """{{ bos_token }}{% for message in messages %}
{%- if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif -%}
<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}
{{ message.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
KNOWN = {"chatml": _CHATML, "llama3": _LLAMA3, "gemma": _GEMMA}


def spelled_out(template: str | None) -> str | None:
    """A template, or the one that is known by this name; an empty one is none."""
    if template is None or not template.strip():
        return None
    return KNOWN.get(template.strip(), template)
