"""What a recipe takes: FLOPs and bytes by formula, and time and cost on given devices.

Nothing is loaded or run. The formulas:

- a token's forward through the target: 2 FLOPs for each active parameter, and 2·T·L·h·d for
  attention over half of a row of T tokens;
- the drafter: 6 FLOPs for each trained parameter, token and depth (forward and backward), and as
  many for the target's lm_head where the drafter has none of its own;
- generation: each round reads the target's weights once, for `regenerate.batch_size` tokens;
- time: FLOPs over a share of the peak (devices.py), or bytes over that share of the bandwidth;
- activations: 17 numbers for each hidden unit, layer, depth and token (Korthikanti et al. 2022,
  attention scores not kept)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from speculators.drafter import Drafter
from speculators.precision import as_dtype
from speculators.target.info import TargetSketch
from train.planner.devices import CONTEXT, SHARE_OF_PEAK, Device, Range
from train.planner.outline import Outline, outline
from train.planner.token_counts import assumed, counter
from train.recipe.recipe import Recipe

ACTIVATIONS = 17  # numbers kept per hidden unit, layer and token
Parts = dict[str, int]  # bytes, by what takes them


@dataclass(frozen=True)
class Phase:
    """`flops`: over all devices; `read`: bytes that the devices read from memory in rounds too
    small for their arithmetic to count, over all devices."""

    name: str
    flops: float
    dtype: torch.dtype
    read: float = 0.0

    def seconds(self, device: Device, count: int) -> Range:
        peak, bandwidth = device.peak(self.dtype), device.bandwidth
        best = max(self.flops / peak, self.read / bandwidth) / count
        return Range(*(best / share for share in reversed(SHARE_OF_PEAK)))


@dataclass
class Stage:
    """One stage of the training. `steps`: None if not known."""

    name: str
    outline: Outline
    steps: int | None
    phases: list[Phase]  # of one step where `steps` is None
    memory: Parts

    def seconds(self, device: Device, count: int) -> Range | None:
        """None if neither steps nor minutes bound the training."""
        minutes = self.outline.recipe.training.max_minutes
        times = [phase.seconds(device, count) for phase in self.phases]
        before, training = times[:-2], times[-2:]
        if self.steps is None and minutes is None:
            return None
        trained = [sum(column) for column in zip(*training, strict=True)]
        if minutes is not None:
            trained = [
                60 * minutes if self.steps is None else min(t, 60 * minutes) for t in trained
            ]
        return Range(*(sum(column) for column in zip(*before, trained, strict=True)))


@dataclass
class Plan:
    """A recipe on `count` devices; `device`: None for figures without time."""

    recipe: Recipe
    device: Device | None
    count: int
    stages: list[Stage]
    price_per_hour: float | None = None  # of one device
    assumptions: list[str] = field(default_factory=list)

    @property
    def phases(self) -> list[tuple[str, Phase]]:
        return [
            (f"{stage.name}: {phase.name}" if stage.name else phase.name, phase)
            for stage in self.stages
            for phase in stage.phases
        ]

    @property
    def seconds(self) -> Range | None:
        """None without a device, or if nothing bounds the training."""
        if self.device is None:
            return None
        times = [stage.seconds(self.device, self.count) for stage in self.stages]
        if None in times:
            return None
        return Range(*(sum(column) for column in zip(*filter(None, times), strict=True)))

    @property
    def cost(self) -> Range | None:
        """In the currency of the price."""
        if self.price_per_hour is None or self.seconds is None:
            return None
        return Range(*(s / 3600 * self.count * self.price_per_hour for s in self.seconds))

    @property
    def memory(self) -> Parts:
        """Bytes of one device in the stage that takes the most."""
        return max((stage.memory for stage in self.stages), key=lambda parts: sum(parts.values()))

    @property
    def fits(self) -> bool:
        """False only if the target's weights and the drafter's weights, gradients and optimizer
        states, all of them exact, exceed the device's memory."""
        held = max(sum(held_bytes(s.outline, self.count).values()) for s in self.stages)
        return self.device is None or held <= self.device.memory

    @property
    def disk(self) -> Parts:
        """Bytes below the run's folder; every stage keeps its own checkpoints."""
        parts: Parts = {}
        for stage in self.stages:
            for name, size in disk(stage.outline).items():
                parts[name] = size if name == "export" else size + parts.get(name, 0)
        return parts


def make_plan(
    recipe: Recipe,
    device: Device | None = None,
    count: int = 1,
    *,
    price_per_hour: float | None = None,
    examples: int | None = None,
    tokens: int | None = None,
) -> Plan:
    """`examples`: of each training source that cannot be counted; `tokens`: of one example."""
    stages = []
    for name, part in recipe.training_stages():
        count_source = counter(part)
        sources = [
            assumed(count_source(s), s, part, examples if s.resolved().name else None, tokens)
            for s in part.data.train
        ]
        facts = outline(part, (sources, []), "cuda" if device else None)
        steps = facts.steps(count)
        phases = estimate_phases(facts, steps or 1, count)
        stages.append(Stage(name, facts, steps, phases, training_memory(facts, count)))
    assumptions = [f"{s.label}: {s.note}" for s in stages[0].outline.sources if s.note]
    low, likely, high = (f"{100 * share:.0f}" for share in SHARE_OF_PEAK)
    assumptions += [
        f"{low} to {high} % (likely {likely}) of the peak rates; not measured",
        "responses as long as those in the data; every source whole, whatever its share",
        "not counted: loading, held-out evaluations, the final measurement, and traffic between"
        " devices",
    ]
    return Plan(recipe, device, count, stages, price_per_hour, assumptions)


def active_parameters(target: TargetSketch) -> float:
    """Parameters that a token is multiplied with: those of routed experts by the share that it
    meets, an embedding that is not the output's left out."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((n for name in names if (n := getattr(target.config, name, None))), None)
    per_token = getattr(target.config, "num_experts_per_tok", None)
    share = per_token / experts if experts and per_token else 1.0
    output, looked_up = target.model.get_output_embeddings(), target.model.get_input_embeddings()
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


def estimate_phases(plan: Outline, steps: int, count: int = 1) -> list[Phase]:
    """The work of `steps` optimizer steps on `count` devices, and of the responses before them."""
    recipe, target, phases = plan.recipe, plan.target, list[Phase]()
    length = recipe.data.max_length
    forward = forward_flops(target, length)
    tokens = steps * plan.step_rows(count).rows_per_step * length
    if recipe.regenerate.enabled and not recipe.regenerate.endpoints and plan.tokens:
        weights = target.num_parameters * target.dtype.itemsize
        rounds = plan.supervised / recipe.regenerate.batch_size
        work = plan.tokens * forward
        phases.append(Phase("responses of the target", work, target.dtype, rounds * weights))
    cached = recipe.features.mode == "cache" and plan.tokens
    seen = min(tokens, plan.tokens) if cached else tokens
    trained = plan.trainable
    if not any("lm_head" in name and p.requires_grad for name, p in plan.head.named_parameters()):
        trained += plan.drafter.hidden_size * plan.drafter.draft_vocab_size
    phases.append(Phase("features of the target", seen * forward, target.dtype))
    drafted = 6.0 * tokens * plan.depths * trained
    return [*phases, Phase("drafter, forward and backward", drafted, plan.autocast)]


def state_bytes(drafter: Drafter) -> int:
    """Bytes of its tensors as training holds and saves them, in float32."""
    return sum(
        t.numel() * (4 if t.is_floating_point() else t.element_size())
        for t in drafter.state_dict().values()
    )


def optimizer_bytes(plan: Outline) -> int:
    """AdamW keeps two numbers for each parameter, Muon one for each of a matrix."""
    matrices: Sequence[torch.nn.Parameter] = ()
    if plan.recipe.training.optimizer == "muon":
        matrices = [p for p in plan.head.weight_matrices() if p.ndim == 2 and p.requires_grad]
    return 8 * plan.trainable - 4 * sum(p.numel() for p in matrices)


def held_bytes(plan: Outline, count: int = 1) -> Parts:
    """Bytes of one device that are exact: weights, gradients and optimizer states."""
    whole = plan.target.num_parameters * plan.target.dtype.itemsize
    return {
        "target's weights": whole if plan.recipe.target.sharding == "none" else whole // count,
        "drafter's weights": state_bytes(plan.head),
        "gradients": 4 * plan.trainable,
        f"states of {plan.recipe.training.optimizer}": optimizer_bytes(plan),
    }


def training_memory(plan: Outline, count: int = 1) -> Parts:
    """Bytes of one device while it trains."""
    recipe, target, drafter = plan.recipe, plan.target, plan.drafter
    rows = plan.step_rows(count).rows * recipe.data.max_length
    layers = getattr(drafter, "num_layers", 1) * plan.depths
    kept = rows * ACTIVATIONS * plan.autocast.itemsize * drafter.hidden_size
    if recipe.training.activation_checkpointing:
        layers = max(layers // plan.depths, 1)  # those of one depth, and the inputs of every one
    parts = held_bytes(plan, count) | {
        "features": rows * plan.feature_bytes,
        "activations": kept * layers,
        "logits of a loss chunk": 3
        * 4
        * plan.chunk_size
        * max(target.vocab_size, drafter.draft_vocab_size),
        "features kept between epochs": int(recipe.training.keep_features_gb * 2**30),
        "runtime and libraries": round(CONTEXT) if plan.device.type == "cuda" else 0,
    }
    if recipe.joint is not None:
        parts["activations of the target"] = (
            rows * ACTIVATIONS * target.dtype.itemsize * target.hidden_size * target.num_layers
        )
    return {name: size for name, size in parts.items() if size}


def disk(plan: Outline) -> Parts:
    """Bytes of the tensors below the run's folder at its end; headers of files add some kB."""
    recipe, config = plan.recipe, plan.drafter
    dtype = recipe.export.dtype
    exported = plan.target.checkpoint_dtype if dtype == "auto" else as_dtype(dtype)
    maps = 8 * config.draft_vocab_size + config.vocab_size if config.reduced_vocabulary else 0
    parts = {
        "checkpoints (one kept, one being written)": 2
        * (state_bytes(plan.head) + optimizer_bytes(plan)),
        "best weights": state_bytes(plan.head),
        "export": plan.parameters * exported.itemsize + maps,
        "responses": 7 * plan.supervised if recipe.regenerate.enabled else 0,  # ids as text
    }
    if recipe.features.mode == "cache":
        parts["features"] = plan.cached_bytes * plan.tokens
    return parts
