"""Llama 3.1 to 3.3: a JSON object with parameters and no mark, or code behind the python tag."""

from __future__ import annotations

from paceline.text.formats.hermes import JsonCalls

PYTHON = "<|python_tag|>"
LLAMA = JsonCalls("llama3", "", "", "; ", argument_key="parameters", also=(PYTHON,))
ENDS = ("<|eot_id|>", "<|eom_id|>")
