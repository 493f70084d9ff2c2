"""The chat formats that llama.cpp knows by name, for models whose file has no template or a wrong one."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from hybrid.tail.llama import lib


def builtin_names() -> list[str]:
    """Their names, sorted."""
    n = int(lib().llama_chat_builtin_templates(None, 0))
    names = (ctypes.c_char_p * n)()
    lib().llama_chat_builtin_templates(names, n)
    return sorted(name.decode() for name in names if name)


class BuiltinTemplate:
    """One of them, with the method of a Jinja template that chats use. What it cannot do is a ValueError."""

    def __init__(self, name: str) -> None:
        self.name = name

    def render(self, *, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, **others: Any) -> str:
        """The prompt as text. Of `others` it takes what every template is given, BOS and EOS, but no tools."""
        if unknown := sorted(others.keys() - {"bos_token", "eos_token"}):
            raise ValueError(f"the format {self.name} knows no {', '.join(unknown)}")
        pairs = []
        for message in messages:
            role, content = message["role"], message.get("content")
            if not isinstance(content, str) or "\0" in content:
                raise ValueError(f"the format {self.name} takes plain text only")
            pairs.append((role.encode(), content.encode("utf-8", "replace")))
        chat = (lib().llama_chat_message * len(pairs))(*pairs)
        room = 2 * sum(len(content) + 64 for _, content in pairs)
        while True:
            out = ctypes.create_string_buffer(room)
            n = lib().llama_chat_apply_template(self.name.encode(), chat, len(pairs), add_generation_prompt, out, room)
            if n < 0:
                raise ValueError(f"llama.cpp cannot apply the format {self.name}")
            if n <= room:
                return out.raw[:n].decode("utf-8", "replace")
            room = n
