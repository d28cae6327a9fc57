"""FrozenTarget: any Hugging Face causal LM, alone or in a multimodal model, as the fixed model
whose distribution is preserved.

One forward gives the taps (hidden states a drafter reads) and the last hidden state (the input of
the output head); `logits` turns the latter into the model's logits. No architecture is known by
name: the decoder layers are the module list of the length in the config, taps are forward hooks on
it, and masks and logit scales are observed on a short probe when the target is made. Every target
gives features; masks for rows of different length, and states that can be rolled back, it may lack
(`decoding_refusal`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from draftsmith.speculators.errors import CheckpointError, ConfigError, UnsupportedTarget
from draftsmith.speculators.hub import split_revision, why_not_loaded
from draftsmith.speculators.layers.grouped_attention import decoding
from draftsmith.speculators.precision import as_dtype, on_host, running_dtype, say_widened
from draftsmith.speculators.target import longrope, probe
from draftsmith.speculators.target.adapted import config_source
from draftsmith.speculators.target.info import auto_class_of
from draftsmith.speculators.target.packed_attention import (
    CPU_ROW,
    LONG_ROW,
    TextLayout,
    additive_mask,
    has_varlen,
    packed,
    packed_mask,
    placeholder,
    text_spans,
)
from draftsmith.speculators.target.probe import Parts, is_quantised, needs_eager
from draftsmith.speculators.target.recurrent import RecurrentLayers
from draftsmith.speculators.target.target_head import TargetHead


@dataclass
class TargetFeatures:
    """The target's features of packed rows, which drafters are trained on."""

    input_ids: Tensor  # [B, T]
    position_ids: Tensor  # [B, T], restarting in each segment
    segment_ids: Tensor  # [B, T], which packed sequence a token belongs to; padding = -1
    loss_mask: Tensor  # [B, T]
    taps: Tensor | None  # [B, T, n·H], in the order of tap_layers; None without taps
    last_hidden: Tensor  # [B, T, H], after the final norm: the output head's input
    seeds: Tensor | None = None  # [B], on the CPU: seeds of each row's random numbers; None: any


class FrozenTarget(TargetHead):
    """A causal LM in evaluation mode whose parameters never require gradients: a `TargetHead` with
    the decoder that its hidden states come from. It taps `tap_layers`."""

    def __init__(self, model: PreTrainedModel, tap_layers: Sequence[int] = ()) -> None:
        super().__init__(model, tap_layers)
        self._eager = self.config._attn_implementation == "eager"
        # What is assumed of the decoder, until `_confirm` has probed it.
        self._masks_by_kind = bool(getattr(self.config, "layer_types", None))
        self._attends_by_name = True
        self._packs = not self._parts.stateful
        self._collected: dict[int, Tensor] | None = None  # taps of the forward in progress
        self._handles = [self._hook_tap(tap) for tap in self.tap_layers]
        self._tapped = bool(self.tap_layers)
        self.recurrent: RecurrentLayers | None = None  # what its layers keep beside keys and values
        # why drafts cannot be verified with it here; None: they can
        self.decoding_refusal: str | None = None
        with torch.no_grad():
            self._confirm(self._parts)

    def _confirm(self, parts: Parts) -> None:
        """Probes the model."""
        probe.confirm_causal(parts)
        self._confirm_taps(parts)
        try:
            parts, recurrent = probe.find_recurrent(parts)
            self._masks_by_kind = probe.confirm_masks(parts)
            self._attends_by_name = probe.attends_by_name(parts)
            self._parts = parts
            if recurrent is None:
                probe.confirm_packing(parts, self._probe_packed)
                return
            self.recurrent = probe.confirm_rollback(parts, recurrent)
        except UnsupportedTarget as error:
            self.decoding_refusal = str(error)
            self._attends_by_name = False
        self._packs = False  # each text of a row alone
        probe.confirm_packing(parts, self._probe_packed)

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str,
        *,
        tap_layers: Sequence[int] = (),
        dtype: torch.dtype | str = "auto",
        device: torch.device | str = "cpu",
        attn_implementation: str = "auto",
        trust_remote_code: bool = False,
        revision: str | None = None,
        on_host: bool = False,
    ) -> FrozenTarget:
        """Loads safetensors weights strictly. Errors: CheckpointError, UnsupportedTarget.

        dtype: "auto" is the checkpoint's own, where the device computes in it (`running_dtype`).
        attn_implementation: "sdpa", "eager", or "auto" (sdpa where it computes all of the
        architecture's attention, else eager). on_host: stay in the host's memory, to be moved to
        `device` later."""
        if attn_implementation not in ("auto", *probe.ATTENTION):
            raise ConfigError(
                f"attn_implementation={attn_implementation!r}; expected auto, sdpa or"
                " eager: the others cannot honour the masks of rows with different lengths",
                where="target",
            )
        if dtype != "auto":
            as_dtype(dtype)
        name, _ = split_revision(path_or_id, revision)
        # transformers takes the revision of an adapter for its base's
        _, revision = config_source(path_or_id, revision)
        source = {"revision": revision, "trust_remote_code": trust_remote_code}
        try:
            model, info = auto_class_of(name, **source).from_pretrained(
                name,
                **source,
                dtype=dtype,
                attn_implementation=None if attn_implementation == "auto" else attn_implementation,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                output_loading_info=True,
            )
        except (OSError, RuntimeError) as error:
            why = why_not_loaded(name, error)
            raise CheckpointError(
                f"cannot load the weights: {why}", where=f"target {path_or_id}"
            ) from error
        except (ValueError, KeyError, ImportError) as error:
            why = f"transformers cannot build it: {error}"
            raise UnsupportedTarget(f"{why}", where=f"target {path_or_id}") from error
        probe.refuse_incomplete(info, path_or_id)
        if attn_implementation == "auto" and needs_eager(model.config.get_text_config()):
            model.set_attn_implementation("eager")
        if running_dtype(dtype, model.dtype, device) != model.dtype and not is_quantised(model):
            model.float()
            say_widened(path_or_id)
        return cls(model if on_host else model.to(device), tap_layers)

    # ------------------------------------------------------------------ what it is

    @property
    def supports_rollback(self) -> bool:
        """True if rows of different length can be decoded together, and rejected drafts taken back.
        Without it a target gives features; `decoding_refusal` says why."""
        return self.decoding_refusal is None

    def require_rollback(self, what: str) -> None:
        """UnsupportedTarget if `what` cannot be done, for it decodes with the target."""
        if self.decoding_refusal is not None:
            raise UnsupportedTarget(
                f"needs a target whose rows can be decoded and rolled back here."
                f" {self.decoding_refusal}. Train on its features, write responses at endpoints"
                " (regenerate.endpoints) and evaluate by real vLLM (evaluation.engines: [vllm])",
                where=f"{what}",
            )

    @property
    def has_window(self) -> bool:
        """True if a layer has a sliding window."""
        return probe.SLIDING in self._parts.kinds

    @property
    def decoder(self) -> nn.Module:
        """The model without its output head."""
        return self._parts.decoder

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder's layers, the first one first."""
        return self._parts.layers

    def close(self) -> None:
        """Removes the hooks; the model is then as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._tapped = False

    # ------------------------------------------------------------------ what it computes

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        key_position_ids: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """input_ids, position_ids [B, T] -> taps [B, T, n·H] (None without taps), last_hidden [B,
        T, H].

        `attention_mask`: None for plain causal attention over rows of equal length, or bool [B, 1,
        T, S], True = attend; layers with a sliding window narrow it by themselves, and recurrent
        ones do not read it. Key j is the row's position j, unless `key_position_ids` [B, S] say
        otherwise, as in a tree of drafts. `past_key_values` must keep every position in every
        layer, and states of recurrent layers as RaggedCache does. The output head is not computed.
        """
        past = 0
        if past_key_values is None and attention_mask is None and not self._packs:
            return self._decode(input_ids)
        self.require_rollback("a forward with a cache or a mask")
        if past_key_values is not None:
            past = past_key_values.get_seq_length()
            states = self.recurrent is None or hasattr(past_key_values, "recurrent")
            if any(past_key_values.is_sliding) or not states:
                raise ConfigError(
                    "past_key_values drops positions in its sliding layers, or rolls no"
                    " recurrent states back; pass a cache that keeps them all (RaggedCache's view,"
                    " or DynamicCache() without a config)",
                    where="target",
                )
        places = (position_ids, key_position_ids)
        return self._run(input_ids, position_ids, attention_mask, places, past, past_key_values)

    def serve_up_to(self, max_length: int) -> None:
        """Fixes LongRoPE's frequencies to those for `max_length` tokens, for any row."""
        longrope.fix_frequencies(self._parts.decoder, max_length)

    def features(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        segment_ids: Tensor,
        loss_mask: Tensor,
        *,
        gradients: bool = False,
        autocast: bool = False,
    ) -> TargetFeatures:
        """Features of packed rows; shapes as in TargetFeatures. A token attends to earlier tokens
        of its own segment only. Where masks cannot separate the texts of a row, as in recurrent
        layers, each text is run as a row of its own. `gradients`: record them, to train
        weights of the model. `autocast`: run under the active one, instead of in the model's
        precision."""
        kept = nullcontext() if autocast else torch.autocast(self.device.type, enabled=False)
        with torch.set_grad_enabled(gradients), kept:
            if not self._packs:
                states = self._run_texts(input_ids, segment_ids)
            elif self._attends_by_name and self._needs_no_mask(input_ids.shape[1]):
                states = self._run_packed(input_ids, position_ids, TextLayout(segment_ids))
            else:
                mask = packed_mask(segment_ids)
                places = (None, None) if mask is None else (position_ids, position_ids)
                states = self._run(input_ids, position_ids, mask, places, 0, None)
        return TargetFeatures(input_ids, position_ids, segment_ids, loss_mask, *states)

    def _confirm_taps(self, parts: Parts) -> None:
        ids = torch.arange(3, device=parts.device)[None]
        taps = self._decode(ids)[0]
        expected = (*ids.shape, len(self.tap_layers) * self.hidden_size)
        if taps is not None and taps.shape != expected:
            raise parts.refusal(
                f"its layers pass on {tuple(taps.shape)} instead of [batch, tokens, hidden size]"
                f" {expected}; a drafter cannot tap several residual streams"
            )

    def _probe_packed(self, *packed: Tensor) -> Tensor:
        """input_ids, position_ids, segment_ids [1, T] -> last_hidden [1, T, H]."""
        return self.features(*packed, loss_mask=packed[0]).last_hidden

    def _run_texts(self, input_ids: Tensor, segment_ids: Tensor) -> tuple[Tensor | None, Tensor]:
        """The texts of packed rows [B, T], each as a row of its own: padding behind a text reaches
        nothing. Padding of the rows gets zeros."""
        known = (on_host(segment_ids) >= 0).tolist()
        texts = []
        for row, spans in enumerate(text_spans(segment_ids)):
            texts += [(row, slice(start, end)) for start, end in spans if known[row][start]]
        texts.sort(key=lambda text: text[1].start - text[1].stop)  # the longest first
        whole: list[Tensor] = []  # taps, if there are any, and last states [B, T, D]
        while texts:
            longest = texts[0][1].stop - texts[0][1].start
            count = max(input_ids.numel() // longest, 1)
            batch = texts[:count]
            texts = texts[count:]
            padded = pad_sequence([input_ids[row, text] for row, text in batch], batch_first=True)
            masks = None
            if self.recurrent is not None:  # transformers would ask the device for texts in rows
                masks = self._masks(None, None, None, 0, *padded.shape)
            outputs = [x for x in self._decode(padded, masks=masks) if x is not None]
            whole = whole or [x.new_zeros(*input_ids.shape, x.shape[2]) for x in outputs]
            for states, output in zip(whole, outputs):
                for (row, text), padded_states in zip(batch, output):
                    states[row, text] = padded_states[: text.stop - text.start]
        *taps, last = whole
        return (taps[0] if taps else None), last

    def _needs_no_mask(self, length: int) -> bool:
        """True of rows that are too long for [T, T] masks, of those whose masked scores cost more
        than attention text by text, and of all where one kernel attends for all texts."""
        if length >= LONG_ROW:
            return True
        if self._eager:
            return False
        if self.device.type == "cpu":
            return length >= CPU_ROW
        return has_varlen(self.device, self.dtype)

    def _run_packed(
        self, input_ids: Tensor, position_ids: Tensor, layout: TextLayout
    ) -> tuple[Tensor | None, Tensor]:
        """A forward of packed rows without masks."""
        full, sliding = (
            placeholder(window, self.device, self.dtype) for window in (0, self._parts.window)
        )
        with packed(self.config, layout):
            return self._decode(input_ids, position_ids, self._shape_masks(full, sliding), None)

    def _run(
        self, input_ids, position_ids, mask, places, past, past_key_values
    ) -> tuple[Tensor | None, Tensor]:
        """A forward. `places`: positions of queries and keys, if there is a mask."""
        masks = self._masks(mask, *places, past, *input_ids.shape)
        if self.recurrent is not None and past_key_values is not None:
            with past_key_values.recurrent(self.recurrent):
                return self._decode(input_ids, position_ids, masks, past_key_values)
        cached = past_key_values is not None and self.device.type in ("cpu", "cuda")
        with decoding(self.config, self._attends_by_name and cached and not self._eager):
            return self._decode(input_ids, position_ids, masks, past_key_values)

    def _decode(
        self, input_ids: Tensor, position_ids: Tensor | None = None, masks=None, cache=None
    ) -> tuple[Tensor | None, Tensor]:
        self._collected = {}
        try:
            output = self._parts.decode(input_ids, cache, position_ids, masks)
            collected = [self._collected[i] for i in self.tap_layers] if self._tapped else []
        finally:
            self._collected = None
        return torch.cat(collected, dim=-1) if collected else None, output.last_hidden_state

    def _masks(
        self,
        mask: Tensor | None,
        queries: Tensor | None,
        keys: Tensor | None,
        past: int,
        B: int,
        T: int,
    ):
        """The decoder's attention_mask: additive [B, 1, T, S] per kind of layer, or None where the
        kernel's causal rule is enough. `queries` [B, T] and `keys` [B, S]: positions for windows;
        None: those of one text per row."""
        narrow = self.has_window and past + T > self._parts.window
        if mask is None:
            if not narrow and (T == 1 or (past == 0 and not self._eager)):
                return self._shape_masks(None, None)
            keys = torch.arange(past + T, device=self.device)[None]  # [1, S]
            queries = keys[:, past:]
            mask = keys <= queries[:, None, :, None]  # [1, 1, T, S]
        full = self._additive(mask, B) if probe.FULL in self._parts.kinds or not narrow else None
        if not narrow:
            return self._shape_masks(full, full)
        keys = torch.arange(mask.shape[-1], device=self.device)[None] if keys is None else keys
        queries = keys[:, past:] if queries is None else queries
        first = queries[:, None, :, None] - self._parts.window  # [B, 1, T, 1]
        inside = keys[:, None, None, :] > first  # [B, 1, T, S]
        return self._shape_masks(full, self._additive(mask & inside, B))

    def _additive(self, mask: Tensor, B: int) -> Tensor:
        """[B or 1, 1, T, S] -> [B, 1, T, S], a view."""
        return additive_mask(mask, self.dtype).expand(B, -1, -1, -1)

    def _shape_masks(self, full: Tensor | None, sliding: Tensor | None):
        if self._masks_by_kind:
            return probe.masks_by_kind(full, sliding)
        return sliding if self.has_window else full

    def _hook_tap(self, tap: int) -> torch.utils.hooks.RemovableHandle:
        """Tap 0 is the first layer's input, tap i the output of layer i-1."""

        def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if self._collected is not None:
                self._collected[tap] = args[0] if args else kwargs["hidden_states"]

        def after(module: nn.Module, args: tuple, output) -> None:
            if self._collected is not None:
                self._collected[tap] = output[0] if isinstance(output, (tuple, list)) else output

        # it changes nothing
        before.is_tap = True  # type: ignore[attr-defined]
        after.is_tap = True  # type: ignore[attr-defined]
        if tap == 0:
            return self._parts.layers[0].register_forward_pre_hook(before, with_kwargs=True)
        return self._parts.layers[tap - 1].register_forward_hook(after)
