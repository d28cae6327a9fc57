"""The prompts of the side-by-side comparison: English and Chinese texts to continue, and
conversations.

Some repeat themselves or ask for parts of the prompt, where n-grams help; others are free, where
only a trained drafter helps. The text is in demo_prompts.json."""

from __future__ import annotations

import json
from pathlib import Path

from draftsmith.speculators.errors import ConfigError

Message = dict[str, str]

DEMOS = ("en", "zh", "chat")
ALIASES = {"te": "en", "tc": "zh"}  # what vLLM guides call them


def demo_prompts(name: str) -> tuple[list[str], list[list[Message]]]:
    """(texts to continue, conversations) of a demo; one of the two is empty. ConfigError for an
    unknown name."""
    name_in_file = ALIASES.get(name, name)
    if name_in_file not in DEMOS:
        known = ", ".join((*DEMOS, *(f"{short} (= {long})" for short, long in ALIASES.items())))
        raise ConfigError(
            f"there are no such prompts; expected one of {known}", where=f"--demo {name}"
        )
    prompts = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))[
        name_in_file
    ]
    return prompts.get("texts", []), prompts.get("chats", [])
