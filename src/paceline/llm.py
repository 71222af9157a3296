"""The library's front door: `LLM(target).generate(prompts)`, `.chat(messages)` and `.stream(prompt)`."""

from __future__ import annotations

import difflib
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, TypeGuard, Unpack

import numpy as np

from paceline.assembly import build_engine
from paceline.chat.answer import ChatAnswer
from paceline.chat.constraint import Grammars, Make
from paceline.chat.forms import form_of
from paceline.chat.messages import A_MESSAGE
from paceline.chat.options import NAMES, ChatOptions, asked_of, parted
from paceline.chat.road import Chats, Turn
from paceline.config import EngineConfig, EngineOptions, SamplingOptions
from paceline.core import Completion, Delta, Pooling, SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.pooling import normed
from paceline.engine.shared import Call, SharedEngine
from paceline.errors import RequestFailed, UsageError, shown
from paceline.media.reader import MediaReader
from paceline.media.talk import Talk
from paceline.options import aliases_of
from paceline.soft_tokens import Kind, copied
from paceline.text.chat import ChatTemplate
from paceline.text.tokenizer import Tokenizer

Prompt = str | list[int]
Media = Mapping[Kind, Seq[Any]]
Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
GRAMMAR_SECONDS = 10.0  # that compiling a grammar may take


class LLM:
    """A target with its drafter, ready to write.

    `target` and `drafter`: `demo` (the bundled pair), `smollm2`, a folder in Hugging Face layout, a GGUF file, or a hub
    id. `drafter` also takes `auto`, `none`, `ngram`, `lookahead`, `model` and the kinds of `drafter_kinds.py`, also with
    `+ngram` behind it. Further options are the fields of `EngineConfig`. `say` gets one line per choice that is made.
    Safe to use from several threads and with several open streams: all share the engine's steps. `close`, or leaving a
    `with` block, gives its memory back. In asyncio there is `AsyncLLM`.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] = "demo",
        *,
        say: Callable[[str], None] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        config = EngineConfig.of({"target": target, **options})
        self._name = config.target
        self._engine: Engine | None = build_engine(config, say or (lambda line: None))
        self._shared = SharedEngine(self._engine)
        self._grammars: Grammars | None = None

    def __repr__(self) -> str:
        if self._engine is None:
            return f"LLM({self._name!r}, closed)"
        info = self.info
        lossy = "verify='typical' (lossy), " if info["verify"] == "typical" else ""
        return (
            f"LLM({self._name!r}, drafter={info['drafter']!r}, {lossy}{info['dtype']} on {info['device']}, "
            f"{info['arithmetic']}, context {self._engine.max_len})"
        )

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *what: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back the weights, the cache and the chat template's process; more than once is allowed.

        Open streams raise UsageError when they are read again, and so does every later call.
        """
        engine, self._engine = self._engine, None
        if engine is None:
            return
        if engine.tokenizer is not None:
            ChatTemplate.close_all(engine.tokenizer)
        if self._grammars is not None:
            self._grammars.close()
        engine.close()
        del self._shared  # the calls that are running keep it until they end

    @property
    def engine(self) -> Engine:
        engine = self._engine
        if engine is None:
            raise UsageError(f"this LLM of {self._name!r} is closed: make a new one")
        return engine

    def _check_open(self) -> None:
        """Raise UsageError if another thread, or who reads a stream, has closed it meanwhile."""
        _ = self.engine

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer = self.engine.tokenizer
        assert tokenizer is not None, "an assembled engine has a tokenizer"
        return tokenizer

    @property
    def reader(self) -> MediaReader | None:
        """What reads pictures; None where nothing can."""
        return self.engine.parts.media if isinstance(self.engine.parts.media, MediaReader) else None

    @property
    def chats(self) -> Chats:
        """How it chats: messages to prompts, and tokens to answers."""
        return Chats.of(self.tokenizer, self.reader)

    def grammars(self) -> Grammars:
        """Compiles what an answer has to look like. Raises UsageError where llguidance is not installed."""
        if self._grammars is None:
            self._grammars = _grammars(self.engine, self.chats)
        return self._grammars

    @property
    def info(self) -> Mapping[str, Any]:
        """What was loaded and chosen, and why."""
        return self.engine.info

    def params(self, **options: Unpack[SamplingOptions]) -> SamplingParams:
        """Sampling parameters with the model's own suggestions (generation_config.json) for what is not said.

        A model that suggests nothing is greedy. Raises UsageError for unknown names and for values that cannot be.
        """
        _check_names(options)
        return SamplingParams(**(dict(self.info.get("sampling", {})) | dict(options)))

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        on_done: Callable[[int, Completion], None] | None = None,
        progress: bool = False,
        images: Seq[Any] = (),
        audio: Seq[Any] = (),
        **options: Unpack[SamplingOptions],
    ) -> list[Completion]:
        """Write all prompts to their ends, side by side; results in the order of the prompts.

        A prompt is a text or a list of token ids. Without `params` the model's own suggestions hold, see `params`;
        keywords say single values of them. `images` and `audio` stand for the `<|image|>`, `<|audio|>` of one prompt, in
        order: paths, bytes, data URLs, PIL images, uint8 arrays, (samples, rate). With n > 1 the further texts are in
        `.siblings`. `on_done(i, completion)` is called as each prompt is finished; `progress` shows a bar on standard
        error. A text that failed has finish_reason "error"; the others are untouched. Raises UsageError for what cannot
        be run, before anything is.
        """
        requests = self.requests(prompts, params, options, {"image": images, "audio": audio})
        done: dict[int, Completion] = {}
        with _Bar(len(requests) if progress else 0) as bar:
            for completion in self.completions(requests):
                if completion is not None:
                    done[completion[0]] = completion[1]
                    bar.advance()
                    if on_done is not None:
                        on_done(*completion)
        return [done[i] for i in sorted(done)]

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        on_done: Callable[[int, Completion], None] | None = None,
        progress: bool = False,
        **options: Unpack[ChatOptions],
    ) -> list[Completion]:
        """Answer a conversation, or several side by side, by the model's chat template; a list as of `generate`.

        A message is {"role": "system" | "user" | "assistant", "content": "..."}, or any other of OpenAI's API. Where
        neither `params` nor max_tokens is given, an answer may be as long as the context. Thinking parts are not in
        `.text` but in `.reasoning`, calls of `tools` in `.tool_calls`; `.warnings` says what of the messages was changed
        because the template does not take it. `tools`, `tool_choice`, `response_format` are those of OpenAI's API.
        Raises UsageError for a model without a template.
        """
        requests, finish = self.conversations(messages, params, options)

        def finished(i: int, completion: Completion) -> None:
            finish(i, completion)
            if on_done is not None:
                on_done(i, completion)

        prompts, each = [ids for ids, _ in requests], [params_of for _, params_of in requests]
        return self.generate(prompts, each, on_done=finished, progress=progress)

    def embed(
        self,
        prompts: Prompt | Seq[Prompt],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        progress: bool = False,
    ) -> list[np.ndarray]:
        """An embedding of each prompt, side by side: float32 [hidden_size] of length 1, in the order of the prompts.

        `pooling`: of the last token's state after the final norm, or the mean of all; without it as the option `pooling`
        of the LLM says. `dimensions`: only so many numbers, of length 1 again. A text gets the tokens that the tokenizer
        itself puts around texts. No embedding depends on the prompts beside it, bit for bit. Raises UsageError.
        """
        requests = self.embeddings(prompts, pooling, dimensions)
        out: dict[int, np.ndarray] = {}
        with _Bar(len(requests) if progress else 0) as bar:
            for done in self.completions(requests):
                if done is not None:
                    out[done[0]] = vector_of(done[1], dimensions)
                    bar.advance()
        return [out[i] for i in sorted(out)]

    def embeddings(
        self, prompts: Prompt | Seq[Prompt], pooling: Pooling | None, dimensions: int | None
    ) -> list[tuple[list[int], SamplingParams]]:
        """What `embed` is asked for as requests, checked. Raises UsageError."""
        width = self.engine.state.target.hidden_size
        if dimensions is not None and not (type(dimensions) is int and 1 <= dimensions <= width):
            raise UsageError(
                f"dimensions={shown(dimensions)} is not possible: give a number from 1 to {width}"
            )
        params = SamplingParams(max_tokens=1, pooling=pooling or self.info["pooling"])
        encode = self.tokenizer.encode_whole
        ids = [encode(p) if isinstance(p, str) else copied(p) for p in _listed(prompts)]
        for prompt in ids:
            self.engine.check(prompt, params)
        return [(prompt, params) for prompt in ids]

    def stream(
        self,
        prompt: Prompt | Seq[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Iterator[Delta]:
        """Write one prompt, yielding each step's delta; the last has `finish_reason` and `stats`. Messages: as `chat`.

        Streams may be read in turn, and `generate` called while some are open: they share the engine's steps. Leaving the
        loop early, an exception in it, closing the stream or losing it cancels the request.
        """
        wanted, sampling = parted(options)
        if _is_talk(prompt):
            (turn,) = self.turns([prompt], params, options)
            answer = self.chats.answer(turn.asked, turn.prompt.inside, turn.params, uuid.uuid4().hex[:16])
            return self._stream(turn.prompt.ids, turn.params, answer)
        _no_chat(wanted)
        (request,) = self.requests([prompt], params, sampling)  # type: ignore[arg-type]  # checked there
        return self._stream(*request, None)

    def _stream(self, ids: list[int], params: SamplingParams, answer: ChatAnswer | None) -> Iterator[Delta]:
        call, shared = Call(), self._shared
        try:
            shared.add(call, ids, params)
            while call.open:
                delta = shared.receive(call)
                yield delta if answer is None else _told(delta, answer)
                self._check_open()
        finally:
            shared.close(call)

    def requests(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None,
        options: Mapping[str, Any],
        media: Media | None = None,
    ) -> list[tuple[list[int], SamplingParams]]:
        """Token ids and parameters of what `generate` is asked for, checked. Raises UsageError."""
        listed = _with_media(media, _listed(prompts), self.reader)
        ids = [self.tokenizer.encode(p) if isinstance(p, str) else copied(p) for p in listed]
        each = self._each(params, options, [len(own) for own in ids], fill=False)
        for prompt, own in zip(ids, each, strict=True):
            self.engine.check(prompt, own)
        return list(zip(ids, each, strict=True))

    def conversations(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        params: SamplingParams | Seq[SamplingParams] | None,
        options: Mapping[str, Any],
    ) -> tuple[list[tuple[list[int], SamplingParams]], Callable[[int, Completion], None]]:
        """What `chat` is asked for as requests, and what takes the completion of one apart."""
        turns = self.turns(_talks(messages), params, options)

        def finish(i: int, completion: Completion) -> None:
            for j, text in enumerate((completion, *completion.siblings)):
                self.settle(turns[i], text, j)

        return [(turn.prompt.ids, turn.params) for turn in turns], finish

    def turns(
        self,
        talks: Seq[Seq[Message]],
        params: SamplingParams | Seq[SamplingParams] | None,
        options: Mapping[str, Any],
    ) -> list[Turn]:
        """Conversations that are ready to be answered. Raises UsageError."""
        wanted, sampling = parted(options)
        _check_names(sampling, also=NAMES)
        chats = self.chats
        asked = [asked_of(chats, talk, wanted) for talk in talks]
        prompts = [chats.prompt(chat) for chat in asked]
        each = self._each(params, sampling, [len(prompt.ids) for prompt in prompts], fill=True)
        return [chats.turn(*chat, self.grammars) for chat in zip(asked, prompts, each, strict=True)]

    def completions(
        self, requests: Seq[tuple[list[int], SamplingParams]]
    ) -> Iterator[tuple[int, Completion] | None]:
        """(which, completion) as each request is finished, None after every other delta: a moment to stop at."""
        call, shared = Call(), self._shared
        try:
            order = {shared.add(call, ids, own): i for i, (ids, own) in enumerate(requests)}
            done: dict[str, dict[int, Completion]] = {name: {} for name in order}
            while call.open:
                self._check_open()
                delta = shared.receive(call)
                if delta.finish_reason is not None:
                    request = call.states[delta.request][delta.index]
                    done[delta.request][delta.index] = request.completion(delta.finish_reason, delta.error)
                if delta.request in call.open:
                    yield None
                else:
                    yield order[delta.request], _family(done.pop(delta.request))
        finally:
            shared.close(call)

    def _each(
        self,
        params: SamplingParams | Seq[SamplingParams] | None,
        options: Mapping[str, Any],
        lengths: Seq[int],
        *,
        fill: bool,
    ) -> list[SamplingParams]:
        """The parameters of each prompt, `said` changed. `fill`: as many tokens as fit, where nothing is said of it."""
        _check_names(options)
        if params is None:
            room = [{"max_tokens": max(self.engine.max_len - n, 1)} if fill else {} for n in lengths]
            return [self.params(**(more | dict(options))) for more in room]
        return _given(params, len(lengths), options)

    def held(self, response_format: Mapping[str, Any] | None) -> Make | None:
        """The constraint of a text that is no chat. Raises UsageError."""
        form = form_of(response_format)
        return None if form is None else self.grammars().compile(form.kind, form.source, "bare")

    def render(self, messages: Seq[Message]) -> tuple[list[int], bool]:
        """(prompt of a conversation, whether it has opened a thinking part). Raises UsageError."""
        prompt = self.chats.prompt(asked_of(self.chats, messages, {}))
        return prompt.ids, prompt.inside

    def settle(self, turn: Turn, done: Completion, index: int = 0) -> None:
        """Put what a completion says, thinks and calls into its fields."""
        name = f"{uuid.uuid4().hex[:16]}_{index}"
        answer = self.chats.answer(turn.asked, turn.prompt.inside, turn.params, name)
        answer.push(
            Delta(done.request, done.index, done.text, done.token_ids, done.origins, finish_reason="stop")
        )
        done.text, done.reasoning, done.tool_calls = answer.content, answer.thoughts, answer.tool_calls()
        done.warnings = list(turn.prompt.changes)


def vector_of(done: Completion, dimensions: int | None) -> np.ndarray:
    """The embedding of a request that has ended. Raises RequestFailed."""
    if done.embedding is None:
        raise RequestFailed(f"an embedding failed: {done.error or done.finish_reason}")
    return done.embedding if dimensions is None else normed(done.embedding, dimensions)


def _told(delta: Delta, answer: ChatAnswer) -> Delta:
    """A delta with what it adds to what is said, thought and called."""
    piece = answer.push(delta)
    return replace(
        delta, text=piece.get("content", ""), reasoning=piece.get("reasoning_content", ""),
        tool_calls=piece.get("tool_calls", []),
    )  # fmt: skip


def _grammars(engine: Engine, chats: Chats) -> Grammars:
    try:
        from paceline.text.grammar import Grammars as Compiler
        from paceline.text.vocabulary import Vocabulary
    except ImportError as error:
        raise UsageError(
            "response_format and forced calls need llguidance: pip install 'paceline[serve]'"
        ) from error
    target, tokenizer = engine.state.target, chats.tokenizer
    ends = tuple(dict.fromkeys([*tokenizer.eos_ids, *target.eos_token_ids]))
    vocabulary = Vocabulary(tokenizer.to_json(), target.vocab_size, ends)
    return Compiler.of(tokenizer, vocabulary, chats.format, GRAMMAR_SECONDS)


def _no_chat(wanted: Mapping[str, Any]) -> None:
    """Raise UsageError for what a prompt cannot have."""
    for name in wanted:
        raise UsageError(f"{name} is for messages: use chat(messages), or leave it out")


class _Bar:
    """A progress bar over `total` prompts on standard error; nothing for 0."""

    def __init__(self, total: int) -> None:
        self._total, self._bar = total, None if not total else _progress()

    def __enter__(self) -> _Bar:
        if self._bar is not None:
            self._bar.start()
            self._bar.add_task("prompts", total=self._total)
        return self

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0])

    def __exit__(self, *what: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _progress() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True))


def _check_names(options: Mapping[str, Any], also: Iterable[str] = ()) -> None:
    """`also`: names that may be meant, too."""
    names = [*SamplingParams.names(), *also]
    for name in options:
        if name not in SamplingParams.names():
            elsewhere = {"sampling_params": "params", "use_tqdm": "progress"} | aliases_of(SamplingParams)
            other = elsewhere.get(name)
            near = [other] if other else difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            raise UsageError(f"unknown sampling parameter {name!r}: {hint}")


def _given(
    params: SamplingParams | Seq[SamplingParams], count: int, options: Mapping[str, Any]
) -> list[SamplingParams]:
    """The parameters of each of `count` prompts, `said` changed. Raises UsageError for what is none."""
    listed = [params] * count if isinstance(params, SamplingParams) else params
    if isinstance(listed, Mapping):
        raise UsageError("params is a dict: give SamplingParams(...), or its values as keywords")
    if not isinstance(listed, Seq) or not all(isinstance(item, SamplingParams) for item in listed):
        raise UsageError(f"params={shown(params)} is not possible: give SamplingParams, or a list")
    if len(listed) != count:
        raise UsageError(f"{count} prompts but {len(listed)} sampling params: give one for all or for each")
    return [replace(item, **options) for item in listed] if options else list(listed)


def _is_ids(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(t, int) for t in value)


def _is_talk(value: object) -> TypeGuard[Seq[Message]]:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Mapping)


def _listed(prompts: object) -> list[Any]:
    """Each of the prompts. Raises UsageError for what is none."""
    if isinstance(prompts, str) or _is_ids(prompts):
        return [prompts]
    wanted = "give a text, a list of token ids, or a list of these"
    if _is_talk(prompts):
        raise UsageError("generate was given messages: use chat(messages)")
    if not isinstance(prompts, list | tuple):
        raise UsageError(f"prompts={shown(prompts)} is not possible: {wanted}")
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and not _is_ids(prompt) and prompt != []:
            raise UsageError(f"prompts[{i}]={shown(prompt)} is not possible: {wanted}")
    return list(prompts)


def _with_media(media: Media | None, listed: list[Any], reader: MediaReader | None) -> list[Any]:
    """The one prompt, whose placeholders stand for media, if there is any. Raises UsageError and PromptError."""
    if not media or not any(len(given) for given in media.values()):
        return listed
    if len(listed) != 1 or not isinstance(listed[0], str):
        raise UsageError("images belong to one prompt that is a text: call generate for each, or chat")
    if reader is None:
        raise UsageError("this model reads text only: leave images and audio out")
    return [reader.prompt(listed[0], Talk([], reader.in_order(listed[0], media)), add_bos=None)]


def _talks(messages: object) -> list[Seq[Message]]:
    """Each of the conversations, of one too. Raises UsageError for what is none."""
    if _is_talk(messages):
        return [messages]
    if not isinstance(messages, list | tuple) or not messages:
        raise UsageError(f"messages={shown(messages)} is not possible: give [{A_MESSAGE}]")
    for i, talk in enumerate(messages):
        if not _is_talk(talk):
            raise UsageError(f"messages[{i}]={shown(talk)} is no message: give {A_MESSAGE}")
    return list(messages)


def _family(texts: Mapping[int, Completion]) -> Completion:
    first, *rest = (texts[i] for i in sorted(texts))
    first.siblings = rest
    return first
