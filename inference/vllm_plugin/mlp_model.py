"""The heads of an MLP speculator (speculators/families/mlp.py) as a model that vLLM loads.

Unlike vLLM's own loaders it is strict: it names every tensor that is missing, unexpected or of
another shape, and a target that the heads were not made for. On several devices each rank holds all
heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from speculators.drafter import take_drafts
from speculators.export.layouts.mlp import MLPLayout
from speculators.families.mlp import MLPSpeculator


class MLPSpeculatorModel(nn.Module):
    """The model of the architecture `MLPSpeculatorPreTrainedModel`."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        speculation = vllm_config.speculative_config
        draft, target = speculation.draft_model_config, speculation.target_model_config
        self.where, self.layout = draft.model, MLPLayout()
        layers = target.hf_text_config.num_hidden_layers
        config: Any = self.layout.from_config(
            draft.hf_config.to_dict(), set(), f"{self.where}/config.json", layers
        )
        self.speculator = MLPSpeculator(config)
        sizes = dict(hidden_size=target.get_hidden_size(), vocab_size=target.get_vocab_size())
        served: Any = SimpleNamespace(
            **sizes, name_or_path=target.model
        )  # all that these heads ask of a target
        self.speculator.attach(served)
        self.speculator.require_depth(
            speculation.num_speculative_tokens, "speculative_config: num_speculative_tokens"
        )

    def forward(
        self, last_hidden: Tensor, token_ids: Tensor, k: int, sample: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """The target's last hidden state [b, H] and the token it gave [b] -> k drafted tokens [b,
        k]."""
        return take_drafts(
            self.speculator.chain(self.speculator.start(last_hidden), token_ids, k), k, sample
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """All of the checkpoint's tensors; the names of all parameters, none of which keeps what it
        was made with."""
        self.layout.fill(self.speculator, self.where, dict(weights))
        self.speculator.freeze()
        return {name for name, _ in self.named_parameters()}
