"""The shape of a prompt: text, or a list of chat messages."""

from __future__ import annotations

import json
from typing import Any, cast

from gyre_core.data.rows import kind_of

PromptValue = str | list[dict[str, Any]]


def read_prompt(value: object) -> PromptValue:
    """A prompt as its row holds it: text, a list of messages, or the JSON text of such a list.

    Text stays as it is, unless it is JSON of a list that holds objects: then it is read as messages. Keys whose
    value is null, which columnar formats fill in, are removed at every depth, for a chat template takes their
    presence as meaning. Raises ValueError, without the row's place, for anything else.
    """
    if isinstance(value, str):
        decoded = _decode_messages(value)
        if decoded is None:
            if not value:
                raise ValueError("the prompt is empty text")
            return value
        return _check_messages(decoded)
    if isinstance(value, list):
        return _check_messages(cast(list[object], value))
    raise ValueError(f"the prompt is {kind_of(value)}; it must be text or a list of messages")


def shape_prompt(prompt: PromptValue, *, system_prompt: str | None, as_chat: bool) -> PromptValue:
    """The prompt as the policy gets it: messages when it is to be a chat, behind the system message if there is one.

    Text becomes the user's message; without either setting it stays text. Raises ValueError, without the row's place,
    for a prompt that brings a system message of its own besides `system_prompt`.
    """
    if system_prompt is None and not as_chat:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system_prompt is None:
        return messages
    if any(message["role"] == "system" for message in messages):
        raise ValueError("the prompt has a system message of its own; take it out, or leave out data.system_prompt")
    return [{"role": "system", "content": system_prompt}, *messages]


def without_null_keys(value: Any) -> Any:
    """A JSON value without the keys, at any depth, whose value is null."""
    if isinstance(value, dict):
        items = cast(dict[str, Any], value).items()
        return {key: without_null_keys(item) for key, item in items if item is not None}
    if isinstance(value, list):
        return [without_null_keys(item) for item in cast(list[Any], value)]
    return value


def _decode_messages(text: str) -> list[object] | None:
    """The list in a JSON text of messages; None when the text is an ordinary prompt."""
    if not text.lstrip().startswith(("[", "{")):
        return None
    try:
        decoded = json.loads(text)
    except ValueError:
        return None
    if isinstance(decoded, dict):
        raise ValueError(
            "the prompt is the JSON text of an object (dict); wrap it in a list if it is a message, "
            "or in the content of a message if it is the text itself"
        )
    items = cast(list[object], decoded)
    return items if any(isinstance(item, dict) for item in items) else None


def _check_messages(items: list[object]) -> list[dict[str, Any]]:
    if not items:
        raise ValueError("the prompt is an empty list of messages")
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items, start=1):
        if not isinstance(item, dict):
            raise ValueError(f"message {number} of the prompt is {kind_of(item)}; it must be an object")
        message = cast(dict[str, Any], without_null_keys(cast(dict[str, Any], item)))
        if not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} of the prompt has no 'role'")
        messages.append(message)
    return messages
