"""Verification rules for a chain: pure functions of (p, proposal, rule). No randomness inside, and
no logits: p and q come after every processor, in float32 as a rule (float64 is kept, for proofs).
The dice are in `rejection_sampler.py`.

A rule is one function in RULES: (p, proposal) -> Verdict. It gives the probability of accepting
each draft and, where it is not 1, the scale s_j in the distribution that the target's own token is
drawn from after j accepted drafts:

    norm(max(s_j p_j - q_j, 0))    if j < number drafted
    p_j                            if every draft was accepted
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.inference.spec_decode.proposal import Proposal
from draftsmith.speculators.precision import on_device


@dataclass
class Verdict:
    """A rule's probabilities for a proposal, before any random number is drawn.

    accept_probs  [B, K], 0 from counts[b] on. With `first_rejection_ends`, of draft k given that
                  those before it were accepted; without, drafts 1..k are kept for the largest k
                  whose own throw succeeds
    p             [B, K+1, V] the target's distributions
    proposal      the drafts that were judged
    scale         [B, K+1] the s_j above; None is 1 everywhere
    """

    accept_probs: Tensor
    p: Tensor
    proposal: Proposal
    scale: Tensor | None = None
    first_rejection_ends: bool = True

    def residual_at(self, accepted: Sequence[int]) -> Tensor:
        """Drafts accepted per row -> [B, V], the one distribution each row needs; p from counts[b]
        on."""
        proposal = self.proposal
        width = proposal.width
        rows = torch.arange(len(accepted), device=self.p.device)
        kept = on_device(accepted, self.p.device)
        p = self.p[rows, kept]  # [B, V]
        rejecting = [j < count for j, count in zip(accepted, proposal.counts, strict=True)]
        if not any(rejecting):
            return p
        position = kept.clamp(max=width - 1)
        weights = p if self.scale is None else p * self.scale[rows, kept].unsqueeze(-1)
        if proposal.q is None:  # s p - onehot(x) is negative at x only
            weights = weights.scatter(-1, proposal.token_ids[rows, position].unsqueeze(-1), 0.0)
        else:
            weights = (weights - proposal.q[rows, position]).clamp_(min=0)
        total = weights.sum(-1, keepdim=True)
        # p = q to the last bit leaves no residual, and nothing that could be rejected but by
        # rounding
        usable = total > 0
        usable &= on_device(rejecting, p.device, torch.bool).unsqueeze(-1)
        return torch.where(usable, weights / total, p)


def verify(p: Tensor, proposal: Proposal, rule: str) -> Verdict:
    """Judges chains by a rule of RULES: p [B, K+1, V], p[b, k] being the target's distribution
    after the first k drafts. Row b is read at 0..counts[b] only."""
    if proposal.q is not None and proposal.q.shape[-1] != p.shape[-1]:
        raise ValueError(
            f"verify: q has {proposal.q.shape[-1]} tokens, p {p.shape[-1]}; scatter a reduced"
            " vocabulary"
        )
    return RULES[rule](p, proposal)


def decide(verdict: Verdict, uniforms: Tensor) -> list[int]:
    """Uniforms [B, K] in [0, 1) -> drafts accepted per row. A draft passes if u < its
    probability."""
    passed = (uniforms < verdict.accept_probs).tolist()
    if verdict.first_rejection_ends:
        return [(row + [False]).index(False) for row in passed]
    return [max((k + 1 for k, ok in enumerate(row) if ok), default=0) for row in passed]


def token_rule(p: Tensor, proposal: Proposal) -> Verdict:
    """Accept x with min(1, p(x)/q(x)), else draw from norm((p - q)+).

    Leviathan et al. 2211.17192, Chen et al. 2302.01318. One-hot q: accept with p(x), else p without
    x."""
    chosen = proposal.token_ids.unsqueeze(-1)  # [B, K, 1]
    # [B, K], p(x); q(x) is 1 if one-hot
    accept = p[:, : proposal.width].gather(-1, chosen).squeeze(-1)
    if proposal.q is not None:
        q_chosen = proposal.q.gather(-1, chosen).squeeze(-1)
        # q(x) = 0 cannot have been drawn: reject it rather than divide
        accept = torch.where(q_chosen > 0, (accept / q_chosen).clamp(max=1), 0.0)
    return Verdict(_only_drafted(accept, proposal), p, proposal)


def block_rule(p: Tensor, proposal: Proposal) -> Verdict:
    """All drafts of a row weighed together: of all rules that call neither model again the one that
    keeps most.

    Sun et al. 2403.10444, algorithm 2. s_j = min(1, s_{j-1} p(x_j) / q(x_j)); draft j < γ is the
    last one kept with probability S / (S + 1 - s_j), S = Σ max(s_j p_j - q_j, 0), and draft γ with
    s_γ. Of one-hot q as token_rule."""
    width = proposal.width
    counts = on_device(proposal.counts, p.device).unsqueeze(-1)
    if width == 0:
        return Verdict(p.new_zeros(p.shape[0], 0), p, proposal)
    chosen = proposal.token_ids.unsqueeze(-1)  # [B, K, 1]
    rise = p[:, :width].gather(-1, chosen).squeeze(-1).log()  # [B, K]
    if proposal.q is not None:
        q_chosen = proposal.q.gather(-1, chosen).squeeze(-1)
        # q(x) = 0 cannot have been drawn
        rise = torch.where(q_chosen > 0, rise - q_chosen.log(), -torch.inf)
    logs = [p.new_zeros(p.shape[0])]
    for k in range(width):
        logs.append((logs[-1] + rise[:, k]).clamp(max=0))
    scale = torch.stack(logs, dim=1).exp()  # [B, K+1], s_0 .. s_K
    inner = scale[:, 1:width]  # [B, K-1], s_1 .. s_{K-1}
    if proposal.q is None:
        rest = inner * (1 - p[:, 1:width].gather(-1, chosen[:, 1:]).squeeze(-1))
    else:
        rest = (inner.unsqueeze(-1) * p[:, 1:width] - proposal.q[:, 1:]).clamp_(min=0).sum(-1)
    below = rest + 1 - inner
    but_last = torch.where(below > 0, rest / below, 1.0)  # [B, K-1]
    accept = torch.cat([but_last, scale[:, width:]], dim=1)  # [B, K]
    last = torch.arange(1, width + 1, device=p.device) == counts  # a row may have drafted fewer
    accept = torch.where(last, scale[:, 1:], accept)
    return Verdict(
        _only_drafted(accept, proposal), p, proposal, scale=scale, first_rejection_ends=False
    )


RULES: dict[str, Callable[[Tensor, Proposal], Verdict]] = {
    "token": token_rule,
    "block": block_rule,
}


def _only_drafted(accept: Tensor, proposal: Proposal) -> Tensor:
    """Zero the acceptance of padding: [B, K]."""
    counts = on_device(proposal.counts, accept.device).unsqueeze(-1)
    return torch.where(torch.arange(proposal.width, device=accept.device) < counts, accept, 0.0)
