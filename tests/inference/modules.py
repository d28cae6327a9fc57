"""LLMs of modules in memory, for tests: one flat call in place of `LLM.from_modules` and its two
dataclasses."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from inference import LLM
from inference.engine.engine import EngineOptions
from inference.spec_decode.proposers.drafter import DraftOptions


def make_llm(model: Any, **options: Any) -> LLM:
    """`options`: fields of EngineOptions and DraftOptions, and what `LLM.from_modules` takes beside
    them."""

    def taken(kind: type) -> Any:
        return kind(
            **{
                field.name: options.pop(field.name)
                for field in fields(kind)
                if field.name in options
            }
        )

    return LLM.from_modules(
        model, options=taken(EngineOptions), drafting=taken(DraftOptions), **options
    )
