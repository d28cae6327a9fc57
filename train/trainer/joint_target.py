"""The target trained with its heads (Medusa-2, arXiv 2401.10774): a LoRA, its loss, its export.

Joint training gives up losslessness with respect to the original target: the heads draft for the
adapted one, which is served. So it is exported beside the heads, everything is measured against it,
and the change of its own loss on held-out text is reported."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.inference.evaluation.expected_acceptance import WrittenText
from draftsmith.speculators.drafter import host_batch, valid_terms
from draftsmith.speculators.errors import UnsupportedTarget
from draftsmith.speculators.export import fresh_folder
from draftsmith.speculators.hub import with_revision
from draftsmith.speculators.layers.peft_adapter import Adapter
from draftsmith.speculators.precision import in_dtype, to_device
from draftsmith.speculators.target.frozen_target import FrozenTarget, TargetFeatures
from draftsmith.speculators.target.probe import is_quantised
from draftsmith.train.losses.objective import chunked_objective
from draftsmith.train.recipe.sections import JointSection
from draftsmith.train.trainer.seeding import seeded

CHANGE = "held_out_loss.json"  # its loss before and after, in the folder of the exported target


class JointTarget(nn.Module):
    """A target with a LoRA that is being trained; its parameters are the adapter's.

    The adapter is drawn from `seed` alone: every process, and a run that goes on, draws the
    same."""

    def __init__(
        self,
        target: FrozenTarget,
        section: JointSection,
        seed: int = 0,
        revision: str | None = None,
    ) -> None:
        """`revision`: of the target, if it is of a repository."""
        super().__init__()
        if is_quantised(target.model):
            raise UnsupportedTarget(
                "the target is quantised, and a LoRA of it could not be merged", where="joint"
            )
        self.section = section
        self.target = target
        fields = {
            "peft_type": "LORA",
            "r": section.r,
            "lora_alpha": section.alpha,
            "target_modules": "all-linear",
        }
        with seeded(seed, target.device):  # the target runs through it from now on
            base = with_revision(target.name_or_path, revision)
            self.adapter = Adapter(target.model, fields, base)
        self.model = self.adapter.peft.eval()

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Those of the LoRA."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The parameters that train, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def load_state_dict(
        self, state: dict[str, Tensor], strict: bool = True, assign: bool = False
    ) -> None:
        """Takes what `state_dict` gives; `strict` and `assign` as of a module."""
        parameters = self.state_dict()
        if parameters.keys() != state.keys():
            differing = sorted(parameters.keys() ^ state.keys())
            raise RuntimeError(f"the adapter's tensors differ: {differing}")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(state[name])

    def heads_weight(self, share: float) -> float:
        """The weight of the heads' loss when `share` of the run is done."""
        if self.section.heads_schedule == "sine":
            return self.section.heads_loss_weight * math.sin(math.pi / 2 * min(share, 1.0))
        return self.section.heads_loss_weight

    def features(self, batch: dict[str, Tensor]) -> TargetFeatures:
        """The adapted target's features, with gradients for the adapter."""
        return self.target.features(**batch, gradients=True)

    def loss(self, features: TargetFeatures, normaliser: Tensor) -> Tensor:
        """Σ -log p(x) / normaliser [] over the supervised tokens of the rows."""
        ids = features.input_ids
        chosen = valid_terms(host_batch(features), 1).flatten().nonzero().flatten()
        kept = to_device(chosen, ids.device)  # [N] of the flat [B·T]
        states = features.last_hidden.flatten(0, 1)[kept]  # [N, H]
        weight = (1 / normaliser.clamp(min=1)).float().expand(len(states))
        logits = self.target.logits
        labels = ids.roll(-1, 1).flatten()[kept]
        loss, _ = chunked_objective(
            states, logits, states.detach(), logits, weight, labels, {"cross_entropy": 1.0}
        )
        return loss

    @staticmethod
    def count_terms(batch: Any) -> Tensor:
        """Supervised tokens of a batch that `loss` reads."""
        return valid_terms(batch, 1).sum()

    # -------------------------------------------------------- held-out text, and what is exported

    def held_out_loss(self, texts: Sequence[WrittenText]) -> tuple[float, float]:
        """Nats per response token, (of the original target, of the adapted one)."""
        with self.model.disable_adapter():
            before = cross_entropy(self.target, texts)
        return before, cross_entropy(self.target, texts)

    def export(self, folder: Path, tokenizer: Any, change: dict[str, float]) -> Path:
        """Writes the adapted target to `folder` as transformers loads it, whole or not at all."""
        with fresh_folder(folder) as fresh:
            if self.section.export == "adapter":
                self.adapter.save(fresh)
            else:
                self._save_merged(fresh)
            tokenizer.save_pretrained(fresh)
            (fresh / CHANGE).write_text(json.dumps(change, indent=2) + "\n")
        return folder

    def _save_merged(self, folder: Path) -> None:
        """Saves in the precision of the checkpoint, not in that of the training."""
        model = self.model.get_base_model()
        dtype = self.target.checkpoint_dtype
        config = model.config
        training_dtype = model.config.dtype
        try:
            model.save_pretrained(folder, state_dict=in_dtype(self.adapter.merged_state(), dtype))
            config.dtype = dtype
            config.save_pretrained(folder)
        finally:
            config.dtype = training_dtype


@torch.no_grad()
def cross_entropy(target: FrozenTarget, texts: Sequence[WrittenText]) -> float:
    """Mean -log p of the response tokens, in nats."""
    total = 0.0
    count = 0
    for prompt, response in texts:
        ids = torch.tensor([[*prompt, *response]], device=target.device)
        _, last = target(ids)
        logits = target.logits(last[0, len(prompt) - 1 : -1]).float()  # [R, V]
        total += float(nn.functional.cross_entropy(logits, ids[0, len(prompt) :], reduction="sum"))
        count += len(response)
    return total / max(count, 1)


def change_of(folder: Path) -> dict[str, float] | None:
    """The loss before and after that `JointTarget.export` wrote into this folder."""
    path = folder / CHANGE
    return json.loads(path.read_text()) if path.exists() else None
