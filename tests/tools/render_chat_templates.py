# SPDX-License-Identifier: Apache-2.0
"""Render the templates of tests/chat_templates.json with transformers, and write what it renders into that file.

Run with transformers 5.24.0 and jinja2 3.1.6: python tests/tools/render_chat_templates.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent.parent / "chat_templates.json"


def rendered(template: str, messages: list[dict[str, str]], variables: dict[str, Any]) -> dict[str, str]:
    """Return {"text": the rendered text}, or {"error": the name of the exception's class}."""
    # The tests do without transformers; only this script needs it.
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=True, **variables)
    except Exception as error:
        return {"error": type(error).__name__}
    return {"text": texts[0]}


def main() -> None:
    table = json.loads(FILE.read_text(encoding="utf-8"))
    chats, variables = table["chats"], table["variables"]
    for entry in [*table["snippets"], *table["templates"]]:
        entry["rendered"] = [rendered(entry["template"], chat, variables) for chat in entry_chats(entry, chats)]
    FILE.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def entry_chats(entry: dict[str, Any], chats: list[list[dict[str, str]]]) -> list[list[dict[str, str]]]:
    """Return the conversations for an entry: the first for a snippet, all for a public template."""
    return chats if "source" in entry else chats[:1]


if __name__ == "__main__":
    main()
