"""Conversations: lists of messages, which a tokenizer's chat template makes one text of.

A template is a program of strangers. It runs in Jinja's sandbox, in the environment that transformers gives
to templates (`utils/chat_template_utils.py`), so it renders the same text. There is no `strftime_now`: a
corpus must not depend on the day on which it is built. Templates of Llama 3 write a fixed date then.

The targets of training are the assistant's turns: what the template encloses in `{% generation %}`. Where it
has no such marks, it is what a turn adds to the conversation before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, NamedTuple

from corpus_server.corpus.files import unreadable
from corpus_server.corpus.tokenizers import CHAT_TEMPLATE
from corpus_server.errors import InvalidParameter
from corpus_server.tools.building.job import Chat
from corpus_server.user_files import parse_json, read_regular

_CONFIG: Final = "tokenizer_config.json"
_ASSISTANT: Final = "assistant"
_MARK: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")


class Rendered(NamedTuple):
    """The text of a conversation, and the ranges of its characters that are targets of training."""

    text: str
    targets: list[tuple[int, int]]


def find_chat(field: str, tokenizer: Path, template: Path | None) -> Chat:
    """Return how conversations are rendered: by a template that the user names, or the tokenizer's own."""
    config: Any = {}
    if (path := tokenizer.with_name(_CONFIG)).exists():
        try:
            config = parse_json(read_regular(path))
            tokens = {name: _text(token) for name, token in config.items() if name.endswith("_token")}
        except (OSError, ValueError, AttributeError) as error:
            raise unreadable(path, f"cannot be read: {error}", "copy it again") from error
    else:
        tokens = {}
    beside = tokenizer.with_name(CHAT_TEMPLATE)
    if template is not None or beside.exists():
        try:
            text = read_regular(template or beside).decode()
        except (OSError, ValueError) as error:
            raise unreadable(template or beside, f"cannot be read: {error}", "check the path") from error
    else:
        found = config.get("chat_template")
        if isinstance(found, list):  # several: for tools, for documents
            found = next((each["template"] for each in found if each.get("name") == "default"), None)
        text = found if isinstance(found, str) else ""
    if not text:
        raise InvalidParameter(
            f"no chat template is known: {tokenizer.parent} has no {CHAT_TEMPLATE} and no {_CONFIG} with one",
            parameter="chat",
            remedy="give a file with --chat-template",
        )
    chat = Chat(field=field, template=text, tokens={name: token for name, token in tokens.items() if token})
    try:
        _compiled(chat.template)
    except Exception as error:  # Jinja's errors of syntax, and what a template makes of them
        raise InvalidParameter(f"the chat template cannot be compiled: {error}", parameter="chat") from error
    return chat


def _text(token: Any) -> str | None:
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def render(chat: Chat, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> Rendered:
    """Render a conversation; `tools` are those that the assistant may call, a list of schemas or its JSON.

    Raises ValueError if the template refuses it, or if the turns of the assistant cannot be found.
    """
    try:
        cleaned = [_cleaned(message) for message in messages]
        blocks_of = partial(_rendered, chat, _tools(tools))
        if _MARK.search(chat.template):
            _, marks = _compiled(chat.template)
            whole = "".join(blocks_of(cleaned))
            _check_parts(cleaned, whole)
            return Rendered(whole, marks.targets)
        blocks = blocks_of(cleaned)
        whole = "".join(blocks)
        _check_parts(cleaned, whole)
        targets = []
        for number, message in enumerate(cleaned):
            if message.get("role") != _ASSISTANT:
                continue
            before = "".join(blocks_of(cleaned[:number], add_generation_prompt=True))
            stop = _common(blocks_of(cleaned[: number + 1]), blocks)
            if not whole.startswith(before) or stop <= len(before):
                raise ValueError(
                    f"the turn of message {number} is not found in what the chat template writes; give one "
                    "that encloses the assistant's turns in {% generation %} with --chat-template"
                )
            targets.append((len(before), stop))
        return Rendered(whole, targets)
    except (RecursionError, ValueError):
        raise
    except Exception as error:  # a template may fail in any way
        raise ValueError(f"the chat template fails: {error or type(error).__name__}") from error


def _cleaned(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as transformers gives it to templates: without nulls, with the names of reasoning."""
    found = {name: value for name, value in message.items() if value is not None}
    reasoning = next((found[name] for name in _REASONING if name in found), None)
    if reasoning is not None:
        found = {"thinking": reasoning, **found, "reasoning_content": reasoning}
    return found


def _check_parts(messages: Sequence[Mapping[str, Any]], text: str) -> None:
    """Refuse a text in which a list of parts stands as Python spells it: the template expects texts."""
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list | dict) and content and str(content) in text:
            raise ValueError(
                f"the chat template takes the content of message {number} for a text, and it is a list of "
                "parts: join their texts, or give a template that takes parts with --chat-template"
            )


def _common(part: Sequence[str], whole: Sequence[str]) -> int:
    """Return how many characters the text of a conversation's beginning shares with the text of all.

    Some templates end the text with a token: such a block is not part of the turn before it.
    """
    text = "".join(part)
    if "".join(whole).startswith(text):
        return len(text)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(part, whole, strict=False))
    return sum(len(block) for block, _ in same)


def _tools(given: Any) -> list[dict[str, Any]] | None:
    """Return tools as templates take them: None if there are none."""
    tools = parse_json(given) if isinstance(given, str) and given else given
    if tools and not (isinstance(tools, list) and all(isinstance(each, dict) for each in tools)):
        raise ValueError(f"expected a list of schemas in 'tools', got {tools!r:.60}")
    return tools or None


def _rendered(
    chat: Chat,
    tools: list[dict[str, Any]] | None,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool = False,
) -> list[str]:
    """Render messages; return the text in the blocks that the template writes."""
    template, marks = _compiled(chat.template)
    blocks: list[str] = []
    marks.begin(blocks)
    given = {"messages": messages, "add_generation_prompt": add_generation_prompt}
    for block in template.generate(**chat.tokens, **given, tools=tools, documents=None):
        blocks.append(block)  # noqa: PERF402 - marks look at the blocks before theirs
    return blocks


class _Marks:
    """Where the blocks `{% generation %}` of a text begin and end, while it is rendered."""

    def begin(self, blocks: list[str]) -> None:
        self._blocks = blocks
        self.targets: list[tuple[int, int]] = []

    def mark(self, text: str) -> str:
        start = sum(map(len, self._blocks))
        self.targets.append((start, start + len(text)))
        return text


@lru_cache(maxsize=1)
def _compiled(text: str) -> tuple[Any, _Marks]:
    """Return a compiled template, and what notes its marks."""
    from jinja2 import TemplateError, ext, nodes, utils
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    marks = _Marks()

    class Generation(ext.Extension):
        tags = {"generation"}  # noqa: RUF012 - Jinja's interface

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_generation"), [], [], body).set_lineno(line)

        def _generation(self, caller: Any) -> str:
            return marks.mark(caller())

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own escapes the characters of HTML.
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    class TemplateNamespace(utils.Namespace):
        # Jinja's own would take names that lead out of the sandbox.
        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"a template cannot set {name!r}")
            super().__setitem__(name, value)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["namespace"] = TemplateNamespace
    return environment.from_string(text), marks
