"""Programs that `paceline launch` starts: for each what it reads, and where its configuration lies in a folder of ours.

Texts hold {url}, {model}, {key}, {folder} and {context}. Each program was tried in the version that is named.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KEY = "paceline"  # programs insist on a key; a server on loopback asks for none
ANSWER = 8192  # tokens of an answer that programs are told of, at most a quarter of the context


@dataclass(frozen=True, slots=True)
class Target:
    """Where a program is to ask. `url` without /v1, `context` in tokens, `folder`: of its configuration."""

    url: str
    model: str
    context: int
    folder: Path
    key: str = KEY


@dataclass(frozen=True, slots=True)
class Program:
    """`command`: what is started, `tried`: its version. `files` are written into the folder, by their name."""

    command: str
    what: str
    install: str
    tried: str
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


_CODEX = """\
model = {model}
model_provider = "paceline"
model_context_window = {context}

[model_providers.paceline]
name = "paceline"
base_url = "{url}/v1"
env_key = "PACELINE_KEY"
wire_api = "responses"
"""
_OPENCODE = """\
{{
  "$schema": "https://opencode.ai/config.json",
  "autoupdate": false,
  "share": "disabled",
  "model": "paceline/{name}",
  "small_model": "paceline/{name}",
  "provider": {{
    "paceline": {{
      "npm": "@ai-sdk/openai-compatible",
      "name": "paceline",
      "options": {{"baseURL": "{url}/v1", "apiKey": "{key}"}},
      "models": {{{model}: {{"name": {model}, "limit": {{"context": {context}, "output": {answer}}}}}}}
    }}
  }}
}}
"""
_AIDER = """\
{{{prefixed}: {{"max_input_tokens": {context}, "max_output_tokens": {answer}, "max_tokens": {answer},
  "input_cost_per_token": 0, "output_cost_per_token": 0, "litellm_provider": "openai", "mode": "chat"}}}}
"""
_CONTINUE = """\
name: paceline
version: 1.0.0
schema: v1
models:
  - name: {model}
    provider: openai
    model: {model}
    apiBase: {url}/v1
    apiKey: {key}
    roles: [chat, edit, apply]
    defaultCompletionOptions:
      contextLength: {context}
      maxTokens: {answer}
"""
_PI = """\
{{
  "providers": {{
    "paceline": {{
      "baseUrl": "{url}/v1", "api": "openai-completions", "apiKey": "{key}",
      "compat": {{"supportsDeveloperRole": false, "supportsReasoningEffort": false, "supportsStore": false}},
      "models": [{{"id": {model}, "contextWindow": {context}, "maxTokens": {answer}}}]
    }}
  }}
}}
"""

PROGRAMS: Mapping[str, Program] = {
    "codex": Program(
        "codex", "OpenAI's agent", "npm install -g @openai/codex", "0.171.0",
        environment={"CODEX_HOME": "{folder}", "PACELINE_KEY": "{key}"},
        files={"config.toml": _CODEX},
    ),
    "claude": Program(
        "claude", "Anthropic's agent", "npm install -g @anthropic-ai/claude-code", "2.1.197",
        environment={
            "ANTHROPIC_BASE_URL": "{url}", "ANTHROPIC_AUTH_TOKEN": "{key}", "ANTHROPIC_MODEL": "{name}",
            "ANTHROPIC_SMALL_FAST_MODEL": "{name}", "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{name}",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "{answer}", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CONFIG_DIR": "{folder}",
        },
    ),
    "aider": Program(
        "aider", "pair programming in a Git repository", "pip install aider-chat", "0.86.2",
        environment={"OPENAI_API_BASE": "{url}/v1", "OPENAI_API_KEY": "{key}", "AIDER_ANALYTICS": "false"},
        files={"models.json": _AIDER},
        arguments=(
            "--model", "openai/{name}", "--model-metadata-file", "{folder}/models.json", "--no-check-update",
            "--no-show-model-warnings",
        ),
    ),
    "opencode": Program(
        "opencode", "an open agent", "npm install -g opencode-ai", "1.18.33",
        environment={"OPENCODE_CONFIG": "{folder}/opencode.json"},
        files={"opencode.json": _OPENCODE},
    ),
    "qwen": Program(
        "qwen", "Qwen's agent", "npm install -g @qwen-code/qwen-code", "0.15.10",
        environment={"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "{key}", "OPENAI_MODEL": "{name}"},
        arguments=("--auth-type", "openai"),
    ),
    "continue": Program(
        "cn", "Continue in the terminal; its editor extensions read the same file", "npm install -g @continuedev/cli",
        "1.5.47", files={"config.yaml": _CONTINUE}, arguments=("--config", "{folder}/config.yaml"),
    ),
    "pi": Program(
        "pi", "an agent with a short prompt and four tools", "npm install -g @mariozechner/pi-coding-agent", "0.73.1",
        environment={"PI_CODING_AGENT_DIR": "{folder}", "PI_TELEMETRY": "0"},
        files={"models.json": _PI},
        arguments=("--provider", "paceline", "--model", "{name}"),
    ),
    "mini": Program(
        "mini", "mini-swe-agent, which has a shell and nothing else", "pip install mini-swe-agent", "2.4.6",
        environment={
            "OPENAI_API_BASE": "{url}/v1", "OPENAI_API_KEY": "{key}", "MSWEA_GLOBAL_CONFIG_DIR": "{folder}",
            "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors",
        },
        arguments=("--model", "openai/{name}"),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """A program for one server, all places filled in."""

    command: list[str]
    environment: dict[str, str]
    files: dict[str, str]


def planned(program: Program, target: Target) -> Plan:
    """`model` stands in quotes in files, `name` without them: both are the model's."""
    values: dict[str, Any] = {
        "url": target.url, "name": target.model, "model": json.dumps(target.model), "key": target.key,
        "folder": target.folder, "context": target.context, "answer": max(1, min(ANSWER, target.context // 4)),
        "prefixed": json.dumps(f"openai/{target.model}"),
    }  # fmt: skip
    return Plan(
        [program.command, *(part.format_map(values) for part in program.arguments)],
        {name: text.format_map(values) for name, text in program.environment.items()},
        {name: text.format_map(values) for name, text in program.files.items()},
    )
