"""What the server answers, for the schema at /openapi.json. Answers are built as plain dicts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    error: ErrorBody


class SpeculationReport(BaseModel):
    """What speculation did for the whole answer."""

    steps: int
    drafted: int
    accepted: int
    tokens_per_step: float
    reason: str | None
    drafted_by_position: list[int]
    accepted_by_position: list[int]
    drafters: dict[str, int]
    seconds: float  # of the engine, from admission to the last token
    first_token_seconds: float
    seed: int
    lossy: bool  # sampled under verify="typical"


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]


class Answer(BaseModel):
    model_config = ConfigDict(extra="allow")
    id: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: Usage
    speculation: SpeculationReport
    warnings: list[str] = []  # what of the request was ignored; left out if nothing was


class ChatAnswer(Answer):
    object: Literal["chat.completion"]


class CompletionAnswer(Answer):
    object: Literal["text_completion"]


class ResponsesAnswer(BaseModel):
    model_config = ConfigDict(extra="allow")
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "in_progress"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    speculation: SpeculationReport
    warnings: list[str] = []


class ModelCard(BaseModel):
    model_config = ConfigDict(extra="allow")
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Version(BaseModel):
    version: str


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int] | list[dict[str, Any]]  # with_pieces: id and piece
    token_strs: list[str] = []  # if they were asked for


class Detokenized(BaseModel):
    prompt: str
    content: str


class Health(BaseModel):
    status: str
