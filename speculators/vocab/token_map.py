"""Token maps for draft models with another tokenizer than the target's: token-level intersection
(TLI, arXiv 2502.05202).

The draft model proposes only tokens that both vocabularies have, and reads the committed text in
its own tokens. Tokens are compared by their bytes (`token_bytes.py`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draftsmith.speculators.errors import CheckpointError, ConfigError
from draftsmith.speculators.vocab.token_bytes import TokenBytes, token_bytes

# in a folder of its own: engines take every *.safetensors beside config.json for weights
FILE = "token_map/model.safetensors"
MIN_SHARED = 64  # text tokens: letters, digits and the space


@dataclass(frozen=True, eq=False)
class SpelledRows:
    """Packed rows of target tokens in the draft model's tokens, padded at the end.

    `ends`: the draft position at which the draft model has read target token t of its document and
    nothing more: the last one that spells t, or that of an earlier token if t has no spelling. -1:
    the document is unread, or t is padding."""

    input_ids: Tensor  # [B, T'], padding = 0
    position_ids: Tensor  # [B, T'], restarting in each segment; padding = 0
    segment_ids: Tensor  # [B, T'], those of the target tokens; padding = -1
    ends: Tensor  # [B, T]


@dataclass(frozen=True, eq=False)
class TokenMap:
    """The map between two vocabularies. S shared tokens, V target ids, N draft ids in all
    spellings.

    q is the draft model's distribution over `draft_ids`, renormalised, and `scatter_to_target` with
    `target_ids` takes it to the target's vocabulary. A shared token is spelt by its counterpart,
    any other text by the longest matching draft tokens from the left; bytes that no draft token
    covers are left out. Special tokens without a counterpart have no spelling, nor have ids without
    a token.

    `opening_ids`: what the draft model's tokenizer puts before any text (a BOS token, mostly), and
    what the model has to see there, unless the target's own opening is spelt so already."""

    target_ids: Tensor  # [S], ascending
    draft_ids: Tensor  # [S], the same tokens
    spelling_ids: Tensor  # [N]
    spelling_offsets: Tensor  # [V + 1]: id i is spelt by spelling_ids[offsets[i] : offsets[i + 1]]
    opening_ids: Tensor  # [K], mostly one or none

    @classmethod
    def between(
        cls,
        target_tokenizer: PreTrainedTokenizerBase,
        draft_tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        draft_vocab_size: int,
    ) -> TokenMap:
        """The map between two tokenizers whose models have these numbers of embeddings; larger ids
        cannot occur.

        ConfigError if the bytes of a tokenizer's tokens are unknown, or if the two share almost no
        tokens."""
        target = token_bytes(target_tokenizer, "the target's tokenizer", vocab_size)
        draft = token_bytes(draft_tokenizer, "the draft model's tokenizer", draft_vocab_size)
        shared = _shared(target, draft)
        texts = sum(id in target.text for id in shared)
        if texts < MIN_SHARED:
            raise ConfigError(
                f"the target's tokenizer ({len(target.text):,} text tokens) and the draft model's"
                f" ({len(draft.text):,}) share {texts:,}: too few to draft with (at least"
                f" {MIN_SHARED}); choose a draft model for the same languages"
            )
        ids = {text: group[0] for text, group in _by_bytes(draft).items()}
        longest = max(map(len, ids))
        spellings = [
            [shared[id]] if id in shared else _greedy(target.text.get(id, b""), ids, longest)
            for id in range(vocab_size)
        ]
        opening = _opening(draft_tokenizer)
        if opening == [draft_id for id in _opening(target_tokenizer) for draft_id in spellings[id]]:
            opening = []
        lengths = torch.tensor([0] + [len(spelling) for spelling in spellings])
        target_ids = sorted(shared)
        return cls(
            target_ids=torch.tensor(target_ids),
            draft_ids=torch.tensor([shared[id] for id in target_ids]),
            spelling_ids=torch.tensor([id for spelling in spellings for id in spelling]),
            spelling_offsets=lengths.cumsum(0),
            opening_ids=torch.tensor(opening, dtype=torch.long),
        )

    @property
    def vocab_size(self) -> int:
        """V, the number of target ids."""
        return len(self.spelling_offsets) - 1

    def to(self, device: torch.device | str) -> TokenMap:
        """The same on a device."""
        return TokenMap(**{name: tensor.to(device) for name, tensor in vars(self).items()})

    def longest_row(self, tokens: int) -> int:
        """The most draft ids for this number of target tokens, with the opening."""
        return tokens * max(int(self.spelling_offsets.diff().max()), 1) + len(self.opening_ids)

    def spell_rows(
        self, token_ids: Tensor, counts: Tensor, begins: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """token_ids [b, M] with counts [b] valid tokens per row -> draft ids [b, M'], counts [b].

        Padding is 0; M' is at least 1. `begins` [b]: rows that start here, which get the opening
        unless empty."""
        columns = torch.arange(token_ids.shape[1], device=token_ids.device)
        valid = columns < counts[:, None]  # [b, M]
        begins = torch.zeros_like(counts, dtype=torch.bool) if begins is None else begins
        first = valid & (columns == 0) & begins[:, None]
        ids, _, lengths = self._spell(token_ids, valid, first)
        return ids, lengths.sum(1)

    def spell_packed(self, input_ids: Tensor, segment_ids: Tensor) -> SpelledRows:
        """input_ids, segment_ids [B, T] (padding = -1) of packed target text -> the same in the
        draft model's tokens.

        Every document begins with the opening. Rows without any token to spell hold one position of
        padding."""
        valid = segment_ids >= 0
        first = valid.clone()
        first[:, 1:] &= segment_ids[:, 1:] != segment_ids[:, :-1]
        ids, source, lengths = self._spell(input_ids, valid, first)
        segments = segment_ids.gather(1, source.clamp(min=0)).masked_fill(source < 0, -1)  # [B, T']
        columns = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        starts = torch.ones_like(segments, dtype=torch.bool)
        starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
        since = (columns * starts).cummax(1).values
        positions = (columns - since).masked_fill(segments < 0, 0)
        ends = lengths.cumsum(1) - 1  # [B, T]
        read = valid & (ends >= 0) & (segments.gather(1, ends.clamp(min=0)) == segment_ids)
        return SpelledRows(ids, positions, segments, ends.masked_fill(~read, -1))

    def _spell(
        self, token_ids: Tensor, valid: Tensor, first: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """token_ids, valid, first (gets the opening) [b, M] -> draft ids [b, M'], the column each
        spells (-1: padding) [b, M'], how many draft ids there are for each target token [b, M]."""
        rows, width = token_ids.shape
        table = torch.cat([self.spelling_ids, self.opening_ids])
        known = token_ids.masked_fill(~valid, 0)
        starts = self.spelling_offsets[known]
        opening = first * len(self.opening_ids)  # [b, M]
        lengths = (self.spelling_offsets[known + 1] - starts) * valid + opening
        before = lengths.cumsum(1) - lengths
        total = lengths.sum(1)
        out = token_ids.new_zeros(rows, max(int(total.max()) if rows else 0, 1))
        source = torch.full_like(out, -1)
        token = torch.repeat_interleave(lengths.flatten())  # [n], which of the b·M each id is for
        first_of = lengths.flatten().cumsum(0) - lengths.flatten()
        within = torch.arange(len(token), device=token.device) - first_of[token]
        skipped = opening.flatten()[token]
        in_spelling = starts.flatten()[token] + within - skipped
        place = torch.where(within < skipped, len(self.spelling_ids) + within, in_spelling)
        row = token // width
        column = before.flatten()[token] + within
        out[row, column] = table[place]
        source[row, column] = token % width
        return out, source, lengths

    def save(self, folder: Path) -> None:
        """Writes `FILE` below `folder`."""
        (folder / FILE).parent.mkdir(exist_ok=True)
        tensors = {name: tensor.cpu().contiguous() for name, tensor in vars(self).items()}
        save_file(tensors, folder / FILE, metadata={"format": "pt"})

    @classmethod
    def load(cls, folder: Path, vocab_size: int | None, draft_vocab_size: int) -> TokenMap:
        """Reads what `save` wrote, for models with these numbers of embeddings (`vocab_size` None:
        any target). CheckpointError names what is wrong."""
        path = folder / FILE
        try:
            tensors = load_file(path)
        except (FileNotFoundError, SafetensorError) as error:
            raise CheckpointError(
                f"{error}; a draft model with its own tokenizer needs this file", where=f"{path}"
            ) from error
        if tensors.keys() == {field.name for field in fields(cls)}:
            token_map = cls(**tensors)
            size = token_map.vocab_size if vocab_size is None else vocab_size
            if token_map._fits(size, draft_vocab_size):
                return token_map
        of_target = "a target's" if vocab_size is None else f"the target's {vocab_size:,}"
        raise CheckpointError(
            f"no map between {of_target} ids and the draft model's"
            f" {draft_vocab_size:,}; export the drafter again",
            where=f"{path}",
        )

    def _fits(self, vocab_size: int, draft_vocab_size: int) -> bool:
        """Whether it is a map between models with these numbers of embeddings."""
        sizes = {"target_ids": vocab_size, "draft_ids": draft_vocab_size}
        sizes |= {"spelling_ids": draft_vocab_size, "opening_ids": draft_vocab_size}
        for name, size in sizes.items():
            ids: Tensor = getattr(self, name)
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < size:
                return False
        whole = len(self.spelling_offsets) and self.spelling_offsets[-1] == len(self.spelling_ids)
        return bool(whole) and self.vocab_size == vocab_size


def _shared(target: TokenBytes, draft: TokenBytes) -> dict[int, int]:
    """target id -> draft id, one to one: tokens of the same bytes, then added tokens of the same
    content.

    Among tokens of the same bytes, byte tokens come last, and lower ids first.
    """
    of_target = _by_bytes(target)
    of_draft = _by_bytes(draft)
    both = of_target.keys() & of_draft.keys()
    shared = {a: b for text in both for a, b in zip(of_target[text], of_draft[text])}
    taken = set(shared.values())
    counterparts = {content: id for id, content in draft.added.items() if id not in taken}
    for id, content in target.added.items():
        if id not in shared and content in counterparts:
            shared[id] = counterparts[content]
    return shared


def _by_bytes(tokens: TokenBytes) -> dict[bytes, list[int]]:
    """The ids of each byte string, in order of preference."""
    groups: defaultdict[bytes, list[int]] = defaultdict(list)
    for id in sorted(tokens.text, key=lambda id: (id in tokens.byte_tokens, id)):
        groups[tokens.text[id]].append(id)
    return groups


def _greedy(text: bytes, ids: Mapping[bytes, int], longest: int) -> list[int]:
    """Splits bytes into the longest tokens, of at most `longest`, from the left."""
    spelling = []
    start = 0
    while start < len(text):
        ends = range(min(len(text), start + longest), start, -1)
        end = next((end for end in ends if text[start:end] in ids), 0)
        if end:
            spelling.append(ids[text[start:end]])
        start = end or start + 1
    return spelling


def _opening(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that the tokenizer puts before any text, mostly a BOS token."""
    whole = tokenizer("a")["input_ids"]
    text = tokenizer("a", add_special_tokens=False)["input_ids"]
    places = (at for at in range(len(whole)) if text and whole[at : at + len(text)] == text)
    return whole[: next(places, 0)]
