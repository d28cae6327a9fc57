"""Draft models as transformers writes them: nothing in config.json that is not its own, but for one section."""

from __future__ import annotations

from speculators.errors import ConfigError
from speculators.export.layouts.draft_model import DraftModelLayout
from speculators.families.draft_model.model import DraftModelConfig


class TransformersLayout(DraftModelLayout):
    """A whole model; an adapter is one of peft's folders, which transformers loads otherwise."""

    format = "transformers"

    def check(self, config: DraftModelConfig) -> None:
        if config.adapter_of is not None:
            raise ConfigError(
                f"export format transformers: adapter_of: this draft model is an adapter of {config.adapter_of}; "
                "export it merged (drafter.peft_export: merged)"
            )
