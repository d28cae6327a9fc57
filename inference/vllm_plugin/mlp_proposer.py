"""vLLM's Medusa proposer with a recurrence: an MLP speculator drafts from the sampled token, too.

The runner that drafts loads it (mlp_speculator.py). The heads are mlp_model.py's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.spec_decode.llm_base_proposer import compute_probs_and_sample_next_token
from vllm.v1.spec_decode.medusa import MedusaProposer


class MLPProposer(MedusaProposer):
    """Loads as Medusa's does: `model` is an `MLPSpeculatorModel`."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        config, self.use_fp64_gumbel = self.spec_config, vllm_config.model_config.use_fp64_gumbel
        self.probabilistic = (
            config.draft_sample_method == "probabilistic"
            and config.rejection_sample_method == "standard"
        )

    def propose_after(
        self,
        scheduler_output: Any,
        sampled_token_ids: list[list[int]],
        sampling_metadata: Any,
        sample_hidden_states: Tensor,
        spec_decode_metadata: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Drafts after a step of the target -> tokens [b, K], and what they were drawn from [b, K,
        V].

        `sampled_token_ids`: what the step kept of each request, the target's own token last;
        nothing of one whose prompt is not read to its end, and whose drafts vLLM drops.
        `sample_hidden_states` [slots, H], after the final norm: each request's slot for its last
        true token, then those of its drafts."""
        drafts = (
            spec_decode_metadata.num_draft_tokens
            if spec_decode_metadata
            else [0] * len(sampled_token_ids)
        )
        slots, first = [], 0
        for tokens, drafted in zip(sampled_token_ids, drafts):
            slots.append(first + max(len(tokens) - 1, 0))
            first += 1 + drafted
        newest = [tokens[-1] if tokens else 0 for tokens in sampled_token_ids]
        return self.propose(
            scheduler_output.num_spec_tokens_to_schedule,
            sample_hidden_states[torch.tensor(slots, device=self.device)],
            sampling_metadata,
            next_token_ids=torch.tensor(newest, device=self.device),
        )

    @torch.inference_mode()
    def propose(
        self,
        num_speculative_tokens: int,
        target_hidden_states: Tensor,
        sampling_metadata: Any,
        *,
        next_token_ids: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Last hidden states [b, H] and the tokens they gave [b] -> as `propose_after`. Greedy
        unless told otherwise: then each row is drawn at its request's temperature, as vLLM's other
        proposers do."""
        probabilities: list[Tensor] = []

        def sample(logits: Tensor) -> Tensor:
            if not self.probabilistic or sampling_metadata.all_greedy:
                return logits.argmax(dim=-1)
            tokens, q = compute_probs_and_sample_next_token(
                logits, sampling_metadata, self.use_fp64_gumbel
            )
            probabilities.append(q)
            return tokens

        drafted = self.model(target_hidden_states, next_token_ids, num_speculative_tokens, sample)
        return drafted, torch.stack(probabilities, dim=1) if probabilities else None
