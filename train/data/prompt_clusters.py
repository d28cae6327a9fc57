"""Prompts by what they are about: k-means over their tokens, weighted by TF-IDF.

A token that every prompt has, such as those of a chat template, weighs nothing. Vectors have length
1, so that a prompt belongs to the centre with the largest cosine (spherical k-means, Dhillon and
Modha 2001). Seeded: the same prompts give the same clusters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_TERMS = 4096  # tokens that are counted: those in the most prompts
LEAST_PROMPTS = 2  # of a token that is counted
STARTS = 8  # of k-means, of which the best is kept
STEPS = 30  # of one of them, at most
NAMING_PROMPTS = 5  # of a cluster that have a token, for it to be one of its name
NAMING_TOKENS = 30


@dataclass(frozen=True)
class PromptClusters:
    """Clusters by their size, the largest first.

    labels       of each prompt, its cluster
    distinctive  of each cluster, the tokens that are most its own, best first: those in
                 NAMING_PROMPTS of its prompts and more
    """

    labels: list[int]
    distinctive: list[list[int]]


def cluster_prompts(prompts: Sequence[Sequence[int]], count: int) -> PromptClusters:
    """`prompts`: token ids, more than `count`. There are at most `count` clusters: fewer if the
    prompts have less to tell them apart by."""
    terms, vectors = _tf_idf(prompts)
    labels, centres = _k_means(vectors, count)
    sizes = labels.bincount(minlength=count)
    order = [i for i in sizes.argsort(descending=True, stable=True).tolist() if sizes[i]]
    has = vectors > 0
    distinctive = []
    for i in order:
        shared = has[labels == i].sum(0) >= NAMING_PROMPTS
        lead = torch.where(shared, centres[i] - vectors.mean(0), 0.0)
        best = lead.argsort(descending=True, stable=True)[:NAMING_TOKENS]
        distinctive.append([terms[j] for j in best.tolist() if lead[j] > 0])
    places = {label: place for place, label in enumerate(order)}
    return PromptClusters([places[label] for label in labels.tolist()], distinctive)


def _tf_idf(prompts: Sequence[Sequence[int]]) -> tuple[list[int], Tensor]:
    """The tokens that are counted, and the prompts [N, terms] as vectors of length 1, or 0."""
    counts = [Counter(prompt) for prompt in prompts]
    prompts_with = Counter(token for count in counts for token in count)
    ranked = sorted(prompts_with, key=lambda token: (-prompts_with[token], token))
    telling = [t for t in ranked if LEAST_PROMPTS <= prompts_with[t] < len(prompts)][:MOST_TERMS]
    columns = {token: column for column, token in enumerate(telling)}
    vectors = torch.zeros(len(prompts), len(telling))
    for row, count in enumerate(counts):
        for token in count.keys() & columns.keys():
            vectors[row, columns[token]] = count[token]
    frequency = torch.tensor([float(prompts_with[token]) for token in telling])
    weighted = vectors.log1p() * (len(prompts) / frequency).log()
    return telling, torch.nn.functional.normalize(weighted, dim=1)


def _k_means(vectors: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Labels [N] and centres [count, terms] of the best of STARTS."""
    generator = torch.Generator().manual_seed(0)
    best = float("-inf")
    for _ in range(STARTS):
        centres = _first_centres(vectors, count, generator)
        labels = (vectors @ centres.T).argmax(1)
        for _ in range(STEPS):
            sums = torch.zeros_like(centres).index_add_(0, labels, vectors)
            centres = torch.nn.functional.normalize(sums, dim=1)
            before = labels
            labels = (vectors @ centres.T).argmax(1)
            if labels.equal(before):
                break
        closeness = float((vectors @ centres.T).amax(1).sum())
        if closeness > best:
            best = closeness
            kept = labels, centres
    return kept


def _first_centres(vectors: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Prompts far from one another, by k-means++ (Arthur and Vassilvitskii 2007)."""
    chosen = [int(torch.randint(len(vectors), (1,), generator=generator))]
    for _ in range(count - 1):
        distance = 1 - (vectors @ vectors[chosen].T).amax(1)
        weights = distance.clamp_min(1e-9)
        chosen.append(int(torch.multinomial(weights, 1, generator=generator)))
    return vectors[chosen]
