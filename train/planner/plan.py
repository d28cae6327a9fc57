"""What a recipe takes: shapes and tokens, FLOPs and bytes by formula, time on given devices.

Nothing is loaded or run: the target and the drafter are modules without memory. The formulas:

- a token's forward through the target: 2 FLOPs for each active parameter, and 2·T·L·h·d for
  attention over half of a row of T tokens;
- the drafter: 6 FLOPs for each trained parameter, token and depth (forward and backward), and as
  many for the target's lm_head where the drafter has none of its own;
- generation: each round reads the target's weights once, for `regenerate.batch_size` tokens;
- the fit of a start: the target's forward over its rows, and the products of its regressions, in
  float32 and on every device alike;
- time: FLOPs over a share of the device's rate (devices.py), or bytes over that share of the
  bandwidth;
- activations: the head's by its family (`Drafter.kept_bytes`), every slot a term; a target's that
  trains too 17 numbers for each hidden unit, layer and token (Korthikanti et al. 2022, attention
  scores not kept)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from draftsmith.speculators.config import DrafterConfig
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.layers.kept_bytes import Batch
from draftsmith.speculators.precision import autocast_dtype, own_device
from draftsmith.speculators.target.info import TargetSketch
from draftsmith.train.features.encodings import bytes_per_token
from draftsmith.train.losses.chunked import default_block_size, default_chunk_size
from draftsmith.train.planner.devices import CONTEXT, Device, this_machine
from draftsmith.train.planner.token_counts import ASSUMED_SHARE, TokenCount, count_tokens
from draftsmith.train.recipe.drafter_config import drafter_config, sketch_drafter
from draftsmith.train.recipe.recipe import Recipe
from draftsmith.train.recipe.sections import RunTraining
from draftsmith.train.trainer.batches import StepRows
from draftsmith.train.trainer.optimizers import muon_matrices
from draftsmith.train.trainer.pace import FEW_STEPS, WHAT_TO_CHANGE

DEVICES_OF_HOST = 8  # which makers put into one
ACTIVATIONS = 17  # numbers that a target keeps per hidden unit, layer and token
BLOCK_TENSORS = 6  # of the float32 logits of a block, that are there at a time
Parts = dict[str, int]  # bytes, by what takes them


@dataclass(frozen=True)
class Phase:
    """`flops`: over all devices; `read`: bytes that the devices read from memory in rounds too
    small for their arithmetic to count, over all devices. `elsewhere`: servers do it meanwhile."""

    name: str
    flops: float
    dtype: torch.dtype
    read: float = 0.0
    elsewhere: bool = False

    def seconds(self, device: Device, count: int) -> float:
        """Seconds on `count` such devices: by arithmetic or by memory, whichever takes longer."""
        if self.elsewhere:
            return 0.0
        best = max(self.flops / device.peak(self.dtype), self.read / device.bandwidth)
        return best / count / device.share


@dataclass
class StagePlan:
    """One stage of a training: the facts that its target's config, its data and its recipe give."""

    recipe: Recipe
    target: TargetSketch
    drafter: DrafterConfig
    head: Drafter  # without memory for its weights
    sources: list[TokenCount] = field(default_factory=list)
    device: torch.device = field(default_factory=own_device)  # that it is to run on
    count: int = 1  # processes, each with a device
    name: str = ""
    first: bool = True  # later ones go on with its drafter

    @property
    def autocast(self) -> torch.dtype:
        """The dtype that the head's layers compute in."""
        return autocast_dtype(self.recipe.training.mixed_precision, self.device)

    @property
    def trainable(self) -> int:
        """Trained parameters of the drafter."""
        return sum(p.numel() for p in self.head.trainable_parameters())

    @property
    def feature_bytes(self) -> int:
        """Bytes per token of taps and last hidden state: on disk, or in the target's dtype."""
        t = self.target
        features = self.recipe.features
        encoding = features.encoding if features.mode == "cache" else "exact"
        return bytes_per_token(encoding, len(self.drafter.tap_layers), t.hidden_size, t.dtype)

    @property
    def depths(self) -> int:
        """Depths of an unroll."""
        asked = self.recipe.drafter.unroll_steps
        return min(asked, self.head.max_depth or asked)

    @property
    def tokens(self) -> int:
        """Of all sources that were counted."""
        return sum(source.tokens for source in self.sources)

    @property
    def supervised(self) -> int:
        """Those of them that are supervised."""
        return sum(source.supervised for source in self.sources)

    @property
    def step_rows(self) -> StepRows:
        """The rows and micro-steps of an optimizer step on each process."""
        return StepRows(self.recipe.training, processes=self.count)

    @property
    def keeps_features(self) -> bool:
        """True if later epochs read the features of the first, from the disk or from memory."""
        kept = self.recipe.training.keep_features_gb * 2**30
        fits = 0 < self.feature_bytes * self.tokens <= kept
        return fits or self.recipe.features.mode == "cache"

    @property
    def kept_on_device(self) -> int:
        """Bytes of features that stay on the device between epochs."""
        t = self.recipe.training
        return int(t.keep_features_gb * 2**30) if t.keep_features_on == "device" else 0

    @property
    def overlaps(self) -> bool:
        """True if the target computes the features of the next rows while the head trains."""
        features = self.recipe.features
        here = features.mode == "online" and not features.endpoints and self.recipe.joint is None
        streams = self.device.type == "cuda" and self.recipe.target.sharding == "none"
        return features.overlap and here and streams

    @property
    def steps(self) -> int | None:
        """Optimizer steps; None: the budget is minutes, or epochs of data that nobody counted."""
        t = self.recipe.training
        if t.steps is not None:
            return t.steps
        if t.epochs is None or not self.tokens:
            return None
        rows = self.tokens / self.recipe.data.max_length  # packed rows are nearly full
        return math.ceil(rows * t.epochs / self.step_rows.rows_per_step)

    @property
    def training(self) -> RunTraining:
        """The training with the preset that the run takes."""
        return self.recipe.training_for(self.steps)

    @property
    def phases(self) -> list[Phase]:
        """The work of the stage, or of one step where the number of steps is not known."""
        recipe = self.recipe
        target = self.target
        length = recipe.data.max_length
        forward = forward_flops(target, length)
        tokens = (self.steps or 1) * self.step_rows.rows_per_step * length
        seen = min(tokens, self.tokens or tokens) if self.keeps_features else tokens
        trained = self.trainable
        parameters = self.head.named_parameters()
        if not any("lm_head" in name and p.requires_grad for name, p in parameters):
            trained += self.drafter.hidden_size * self.drafter.draft_vocab_size
        served = bool(recipe.features.endpoints)
        passes = 2 if recipe.joint else 1  # the gradients of states take what a forward takes
        work = passes * seen * forward
        features = Phase("features of the target", work, target.dtype, elsewhere=served)
        drafted = 6.0 * tokens * self.depths * trained
        drafting = Phase("drafter, forward and backward", drafted, self.autocast)
        return [*self.writing, *self.fitting, features, drafting]

    @property
    def writing(self) -> list[Phase]:
        """The target's responses, if this stage writes them."""
        recipe = self.recipe
        target = self.target
        if not recipe.regenerate.enabled or recipe.regenerate.endpoints or not self.tokens:
            return []
        weights = target.num_parameters * target.dtype.itemsize
        read = weights * self.supervised / recipe.regenerate.batch_size
        work = self.tokens * forward_flops(target, recipe.data.max_length)
        return [Phase("responses of the target", work, target.dtype, read)]

    @property
    def fitting(self) -> list[Phase]:
        """The fit of the start, and the features that it needs where the disk has none."""
        if not (terms := self.start_terms):
            return []
        target = self.target
        features = self.recipe.features
        phases = list[Phase]()
        if features.mode == "online":
            forward = forward_flops(target, self.recipe.data.max_length)
            work = self.count * self.fitted_tokens * forward
            served = bool(features.endpoints)
            phases.append(Phase("features of the fit", work, target.dtype, elsewhere=served))
        work = self.count * self.head.start_flops(self.recipe.drafter, terms)
        return [*phases, Phase("fit of the start", work, torch.float32)]

    def writing_seconds(self, device: Device) -> float:
        """Of the target's responses, if this stage writes them."""
        return sum(phase.seconds(device, self.count) for phase in self.writing)

    def fitting_seconds(self, device: Device) -> float:
        """Of the fit of a start, which a budget of minutes pays."""
        return sum(phase.seconds(device, self.count) for phase in self.fitting)

    def step_seconds(self, device: Device) -> float:
        """Of one optimizer step: the mean, or where the number is not known one of the first
        epoch."""
        *_, features, drafting = self.phases
        seconds = features.seconds(device, self.count) + drafting.seconds(device, self.count)
        return seconds / (self.steps or 1)

    def states_per_second(self, device: Device) -> float:
        """Tokens whose states servers have to give, so that the training never waits for them."""
        tokens = self.step_rows.rows_per_step * self.recipe.data.max_length
        return tokens / self.step_seconds(device)

    def seconds(self, device: Device) -> float:
        """Infinite if neither steps nor minutes bound the training."""
        steps = math.inf if self.steps is None else self.steps
        minutes = self.recipe.training.max_minutes
        training = self.fitting_seconds(device) + steps * self.step_seconds(device)
        return self.writing_seconds(device) + min(training, 60 * minutes if minutes else math.inf)

    def steps_within_minutes(self, device: Device) -> float:
        """Infinite without a budget of minutes."""
        minutes = self.recipe.training.max_minutes
        if not minutes:
            return math.inf
        seconds = max(60 * minutes - self.fitting_seconds(device), 0.0)
        first = self.step_seconds(device)
        epoch = self.tokens / (self.step_rows.rows_per_step * self.recipe.data.max_length)
        if self.steps is not None or not self.keeps_features or seconds <= epoch * first:
            return seconds / first
        later = self.phases[-1].seconds(device, self.count)
        return epoch + (seconds - epoch * first) / later

    @property
    def held(self) -> Parts:
        """Bytes of one device that are exact: weights, gradients and optimizer states."""
        target = self.whole_target if self.recipe.trains_with_decoder else self.target_head
        return {
            "target's weights": target,
            "drafter's weights": self.head_bytes,
            "gradients": 4 * self.trainable,
            f"states of {self.training.optimizer}": self.optimizer_bytes,
            "LoRA, its gradients and states": 16 * self.lora,  # AdamW's, all in float32
        }

    @property
    def head_bytes(self) -> int:
        """Bytes of the drafter's weights in float32, and of what it keeps beside them."""
        state = self.head.state_dict().values()
        return sum(t.numel() * (4 if t.is_floating_point() else t.element_size()) for t in state)

    @property
    def lora(self) -> int:
        """Numbers of the LoRA on the linear layers of a target that is trained too; 0: it is
        not."""
        joint = self.recipe.joint
        if joint is None:
            return 0
        model = self.target.model
        output = model.get_output_embeddings()
        layers = (m for m in model.modules() if isinstance(m, nn.Linear | Conv1D))
        return sum(joint.r * sum(m.weight.shape) for m in layers if m is not output)

    @property
    def whole_target(self) -> int:
        """Bytes of the target's weights on one device."""
        whole = self.target.num_parameters * self.target.dtype.itemsize
        return whole // self.shards if self.recipe.target.sharding != "none" else whole

    @property
    def on_one_host(self) -> int:
        """Processes of one host."""
        return min(self.count, DEVICES_OF_HOST)

    @property
    def shards(self) -> int:
        """Into which a sharded target is cut: one for each device of a host, with replicas on the
        others; where the hosts differ in size, one for each device of all (`target_mesh`)."""
        return self.count if self.count % self.on_one_host else self.on_one_host

    @property
    def target_head(self) -> int:
        """Bytes of its embedding and output head, which are one if they are tied."""
        model = self.target.model
        tables = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
        return sum(table.numel() for table in tables) * self.target.dtype.itemsize

    @property
    def written_with(self) -> Parts:
        """Bytes of one device while responses and features are written, before the training."""
        return {"target's weights": self.whole_target if self.recipe.writes_with_decoder else 0}

    @property
    def start_terms(self) -> int:
        """Terms that a start is fitted to: as many as it asks for, or as the data has; 0: none."""
        if self.recipe.drafter.init_from is not None or not self.first:
            return 0
        asked = self.head.start_terms(self.recipe.drafter)
        return min(asked, self.supervised or asked)

    @property
    def fitted_tokens(self) -> int:
        """Tokens of the rows that a start is fitted to; 0: none is."""
        share = self.supervised / self.tokens if self.supervised else ASSUMED_SHARE
        return round(self.start_terms / share)

    @property
    def fitted_with(self) -> Parts:
        """Bytes of one device while a start is fitted, before the training; empty: none is."""
        if not (terms := self.start_terms):
            return {}
        t = self.target
        exact = bytes_per_token("exact", len(self.drafter.tap_layers), t.hidden_size, t.dtype)
        held = self.held
        return {
            "target's weights": held["target's weights"],
            "drafter's weights": held["drafter's weights"],
            "features of the fit": self.fitted_tokens * exact,
            "fit of the start": self.head.start_bytes(self.recipe.drafter, terms),
            "runtime and libraries": self.runtime,
        }

    @property
    def runtime(self) -> int:
        """Bytes of one device that are there in any case."""
        return round(CONTEXT) if self.device.type == "cuda" else 0

    @property
    def optimizer_bytes(self) -> int:
        """AdamW keeps two numbers for each parameter, Muon one for each of a matrix."""
        matrices: Sequence[torch.nn.Parameter] = ()
        if self.training.optimizer == "muon":
            matrices = muon_matrices(self.head)
        return 8 * self.trainable - 4 * sum(p.numel() for p in matrices)

    @property
    def host(self) -> Parts:
        """Bytes of the memory of one host, for all of its processes."""
        recipe = self.recipe
        loads = recipe.trains_with_decoder or recipe.writes_with_decoder
        copies = self.device.type != "cpu" and loads
        unread = recipe.features.unread_gb * 1e9 if recipe.features.endpoints else 0.0
        return {
            "target while it is loaded": self.whole_target * self.on_one_host if copies else 0,
            "states under way or unread": round(unread * self.on_one_host),
        }

    @property
    def disk(self) -> Parts:
        """Bytes left on the disk: two checkpoints, the best weights, and features."""
        cached = self.feature_bytes * self.tokens if self.recipe.features.mode == "cache" else 0
        joint = self.recipe.joint
        whole = self.target.num_parameters * self.target.checkpoint_dtype.itemsize
        trained = whole if joint and joint.export == "merged" else 4 * self.lora
        return {
            "checkpoints": 3 * self.head_bytes + 2 * self.optimizer_bytes + 28 * self.lora,
            "trained target": trained,
            "features": cached,
        }

    @property
    def memory(self) -> Parts:
        """Bytes of one device while it trains."""
        rows = self.step_rows.rows * self.recipe.data.max_length
        return self.held | {
            "features": rows * self.feature_bytes,
            "activations": self.head.kept_bytes(self.batch),
            "weights as products read them": self.cast_weights,
            "activations of the target": self._target_activations(rows),
            "loss, a chunk at a time": self._loss_bytes,
            "features of the next rows": rows * self.feature_bytes if self.overlaps else 0,
            "features kept between epochs": self.kept_on_device,
            "runtime and libraries": self.runtime,
        }

    @property
    def batch(self) -> Batch:
        """What a micro-step unrolls on one device."""
        return Batch(
            rows=self.step_rows.rows,
            length=self.recipe.data.max_length,
            depths=self.depths,
            dtype=self.autocast,
            device=self.device,
            recomputes=self.recipe.training.activation_checkpointing,
        )

    @property
    def cast_weights(self) -> int:
        """Bytes of the trained matrices but the output head's in the dtype of autocast, which keeps
        each that a forward has cast until its backward pass; 0 in float32."""
        if self.autocast == torch.float32 or self.recipe.training.activation_checkpointing:
            return 0
        heads = {id(p) for p in self.head.head_parameters()}
        tables = {id(m.weight) for m in self.head.modules() if isinstance(m, nn.Embedding)}
        matrices = (p for p in self.head.trainable_parameters() if p.ndim > 1)
        cast = (p for p in matrices if id(p) not in heads | tables)
        return self.autocast.itemsize * sum(p.numel() for p in cast)

    @property
    def _loss_bytes(self) -> int:
        """Bytes of the objective at its peak, beside the gradient that it adds up.

        The states of all depths in one tensor, and their gradient. Of a chunk the target's logits
        and the head's, which become their own gradient, in the dtypes of their products; a trained
        head's weight as its product reads it; and first a few float32 tensors of a block's logits
        (softmaxes, their minimum, the gradient), then the gradient of the weight by this chunk."""
        target = self.target
        tokens = self.drafter.draft_vocab_size
        vocabulary = max(target.vocab_size, tokens)
        chunk = default_chunk_size(vocabulary, self.device)
        size = self.autocast.itemsize
        logits = chunk * (target.vocab_size * target.dtype.itemsize + tokens * size)
        heads = [p.numel() for p in self.head.head_parameters() if p.ndim > 1]
        weight = max(heads, default=0) * size
        block = BLOCK_TENSORS * 4 * default_block_size(vocabulary, self.device) * vocabulary
        cast = weight if size < 4 else 0
        states = 2 * self.head.state_bytes(self.batch)
        return states + logits + cast + max(block, weight)

    def _target_activations(self, tokens: int) -> int:
        """Bytes that a forward of the target leaves for its backward pass; 0: it has none."""
        target = self.target
        states = tokens * target.hidden_size * target.num_layers if self.recipe.joint else 0
        return ACTIVATIONS * target.dtype.itemsize * states


@dataclass
class Plan:
    """A recipe on `count` devices; `device`: None for results without time."""

    recipe: Recipe
    device: Device | None
    count: int
    stages: list[StagePlan]

    @property
    def seconds(self) -> float | None:
        """None without a device, or if nothing bounds the training."""
        if self.device is None:
            return None
        seconds = sum(stage.seconds(self.device) for stage in self.stages)
        return seconds if math.isfinite(seconds) else None

    @property
    def memory(self) -> Parts:
        """Bytes of one device where it takes the most: in a training, or before it."""
        parts = list[Parts]()
        for stage in self.stages:
            parts += [stage.memory, stage.written_with, stage.fitted_with]
        return max(parts, key=lambda part: sum(part.values()))

    @property
    def host(self) -> Parts:
        """Bytes of the memory of one host, where a stage takes the most."""
        return max((stage.host for stage in self.stages), key=lambda part: sum(part.values()))

    @property
    def disk(self) -> Parts:
        """Bytes on the disk, of all stages together."""
        total: Counter[str] = Counter()
        for stage in self.stages:
            total.update(stage.disk)
        return dict(total)

    @property
    def fits(self) -> bool:
        """False only if the target's weights and the drafter's weights, gradients and optimizer
        states, all of them exact, exceed the device's memory."""
        parts = [part for stage in self.stages for part in (stage.held, stage.written_with)]
        held = max(sum(part.values()) for part in parts)
        return self.device is None or held <= self.device.memory

    @property
    def assumptions(self) -> list[str]:
        """Sentences on what the figures take for granted."""
        return [
            *(f"{s.label}: {s.note}" for s in self.stages[0].sources if s.note),
            *([f"{self.device.share:.0%} of {self.device.rates}"] if self.device else []),
            "no loading, no evaluations, no traffic between devices",
        ]

    @property
    def warnings(self) -> list[str]:
        """What to change where a budget of minutes holds hardly a step, a line for each stage."""
        if self.device is None:
            return []
        return [_few_steps(stage, self.device) for stage in self.stages if _cut(stage, self.device)]


def make_plan(
    recipe: Recipe, device: Device | None = None, count: int = 1, *, examples: int | None = None
) -> Plan:
    """`examples`: of each training source that cannot be counted."""
    runs_on = torch.device(device.kind) if device else own_device()
    sources = [count_tokens(part, examples) for _, part in recipe.training_stages()]
    return Plan(recipe, device, count, _make_stages(recipe, sources, runs_on, count))


def short_budgets(recipe: Recipe, count: int) -> list[str]:
    """The warnings of a plan for `count` devices like this machine's. No data is counted."""
    parts = recipe.training_stages()
    if not any(part.training.max_minutes for _, part in parts):
        return []
    stages = _make_stages(recipe, [[] for _ in parts], own_device(), count)
    return Plan(recipe, this_machine(), count, stages).warnings


def _make_stages(
    recipe: Recipe, sources: Sequence[Sequence[TokenCount]], device: torch.device, count: int
) -> list[StagePlan]:
    """`sources`: of each stage."""
    parts = zip(recipe.training_stages(), sources, strict=True)
    return [
        make_stage(part, counted, device, count, name, first=number == 0)
        for number, ((name, part), counted) in enumerate(parts)
    ]


def _cut(stage: StagePlan, device: Device) -> bool:
    """True if minutes end the training of a stage after fewer than FEW_STEPS steps."""
    within = stage.steps_within_minutes(device)
    return within < min(stage.steps or math.inf, FEW_STEPS)


def _few_steps(stage: StagePlan, device: Device) -> str:
    minutes = stage.recipe.training.max_minutes
    seconds = stage.step_seconds(device)
    steps = int(stage.steps_within_minutes(device))
    each = f"{seconds:,.1f} s each"
    if fitting := stage.fitting_seconds(device):
        each += f" behind {fitting:,.0f} s that fit the start"
    return (
        f"training.max_minutes: about {steps} steps fit into {minutes:g} min, {each};"
        f" a drafter needs hundreds. {WHAT_TO_CHANGE}"
    )


def make_stage(
    recipe: Recipe,
    sources: Sequence[TokenCount] = (),
    device: torch.device | None = None,
    count: int = 1,
    name: str = "",
    *,
    first: bool = True,
) -> StagePlan:
    """Reads the configs of target and student. ConfigError as the run itself would raise it."""
    device = device or own_device()
    target = recipe.target.sketch(device)
    config = drafter_config(recipe, target, planning=True)
    head = sketch_drafter(recipe, config).prepare_training(recipe.drafter)
    return StagePlan(recipe, target, head.config, head, list(sources), device, count, name, first)


def active_parameters(target: TargetSketch) -> float:
    """Parameters that a token is multiplied with: those of routed experts by the share that it
    meets, an embedding that is not the output's left out."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((n for name in names if (n := getattr(target.config, name, None))), None)
    per_token = getattr(target.config, "num_experts_per_tok", None)
    share = per_token / experts if experts and per_token else 1.0
    output = target.model.get_output_embeddings()
    looked_up = target.model.get_input_embeddings()
    tied = output is not None and output.weight is looked_up.weight
    return sum(
        p.numel() * (share if ".experts." in name else 1.0)
        for name, p in target.model.named_parameters()
        if tied or p is not looked_up.weight
    )


def forward_flops(target: TargetSketch, length: int) -> float:
    """FLOPs of the target's forward, for one token of a row of `length` tokens."""
    config = target.config
    heads = getattr(config, "num_attention_heads", 1)
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return 2 * active_parameters(target) + 2 * length * target.num_layers * width
