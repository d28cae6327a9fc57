"""What vLLM servers are to give of each text, and the folder that says so.

vLLM's answer names a file and not which layers it holds. The folder's name does: it is made of
everything that the states depend on, `draftsmith serving-args` puts it into the server's command,
and the trainer reads from no other."""

from __future__ import annotations

import getpass
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.target.info import TargetSketch
from draftsmith.speculators.target.target_head import START_TOKENS, TargetHead
from draftsmith.train.recipe.recipe import Recipe

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class StatesSpec:
    """The states of a text of T tokens: [T, layers, H].

    model: the target's name. layers: k is the residual stream after k layers; the last is the one
    before the final norm. longest: tokens of a text, at most."""

    model: str
    layers: tuple[int, ...]
    hidden_size: int
    dtype: torch.dtype
    longest: int

    @classmethod
    def of_recipe(
        cls, recipe: Recipe, tap_layers: Sequence[int], target: TargetSketch | TargetHead
    ) -> StatesSpec:
        """The taps of a recipe's drafter in their order, and the stream before the final norm.

        ConfigError: rows as long as the target's limit, of which no server gives the states."""
        layers = (*(tap for tap in tap_layers if tap != target.num_layers), target.num_layers)
        most = getattr(target.config, "max_position_embeddings", None)
        if most is not None and recipe.data.max_length >= most:
            raise ConfigError(
                f"{recipe.data.max_length} tokens, and vLLM answers a text with one token more, but"
                f" {recipe.target.model} is made for {most}; set it to at most {most - 1}",
                where="data.max_length",
            )
        longest = max(recipe.data.max_length, START_TOKENS)  # a start's text may be asked for, too
        return cls(recipe.target.model, layers, target.hidden_size, target.dtype, longest)

    @property
    def dtype_name(self) -> str:
        """As vLLM's --dtype has it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def label(self) -> str:
        """The name of the folder that these states lie in."""
        name = Path(self.model).name or self.model
        text = f"{name}-layers-{'-'.join(map(str, self.layers))}-{self.dtype_name}"
        return re.sub(r"[^\w.-]+", "-", text)

    def bytes_of(self, tokens: int) -> int:
        """Of the states of a text."""
        return tokens * len(self.layers) * self.hidden_size * self.dtype.itemsize


def states_root(folder: str | None) -> Path:
    """The folder that the servers' folders lie in: the recipe's, or one in shared memory."""
    if folder is not None:
        return Path(folder).absolute()
    parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as the users of containers are
        user = str(os.getuid())
    return parent / f"draftsmith-{user}"
