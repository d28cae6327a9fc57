"""`--dry-run`: what a recipe would do, computed before any weight is loaded or a token is generated.

Shapes and parameter counts are exact, from the configuration alone. Token counts come from a sample of the data,
memory and disk from the formulas below; both say "about". Knows sizes; runs nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from inference.llm_loading import load_tokenizer
from speculators.attention import RECOMPUTE_FROM
from speculators.config import DrafterConfig
from speculators.errors import CheckpointError
from speculators.target import FrozenTarget
from train.bad_rows import BadRow, BadRows
from train.chunked import default_chunk_size
from train.data import conversation_tokenizer, fit_rows
from train.masks import TokenRow
from train.prepare import bad_rows
from train.recipe import Recipe
from train.recipe_data import Source, TemperatureShare
from train.sources import Example, load_source
from train.target_sketch import TargetSketch, sketch_target

SAMPLE = 200  # examples of each source that are tokenised
ADAM_BYTES = 16  # per trained parameter: float32 weight, gradient and two moments
CHECKPOINT_BYTES = 12  # per trained parameter: weight and two moments


@dataclass
class TokenCount:
    """What one source holds. Estimates are the sample's means times the number of examples."""

    label: str
    examples: int | None = None  # None: not read
    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    note: str = ""


@dataclass
class DryRun:
    """The facts that `describe` prints."""

    recipe: Recipe
    target: TargetSketch
    drafter: DrafterConfig
    shapes: dict[str, tuple[int, ...]]  # of the drafter's tensors
    trainable: int
    frozen: int  # parameters of the drafter that are not trained
    reads_last_hidden: bool
    sources: list[TokenCount] = field(default_factory=list)
    validation: list[TokenCount] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)  # bytes, by what takes them
    disk: dict[str, int] = field(default_factory=dict)
    steps: int | None = None  # None: the budget is minutes

    @property
    def feature_bytes(self) -> int:
        """Per token: the taps and the last hidden state, in the target's dtype."""
        return (len(self.drafter.tap_layers) + 1) * self.target.hidden_size * self.target.dtype.itemsize

    @property
    def tokens(self) -> int:
        return sum(source.tokens for source in self.sources)


def describe(recipe: Recipe, console: Console | None = None) -> None:
    """Print what a run of this recipe would do."""
    plan, console = estimate(recipe), console or Console()
    for title, rows in _sections(plan):
        table = Table(
            title=title, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False
        )
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        for name, value in rows:
            table.add_row(name, escape(value))
        console.print(table)
        console.print()
    shapes = Table(
        "tensor", "shape", title="Trained tensors", title_justify="left", title_style="bold", box=SIMPLE_HEAD
    )
    for name, shape, count in _alike(plan.shapes):
        shapes.add_row(name, " x ".join(map(str, shape)) + (f"  ({count} of them)" if count > 1 else ""))
    console.print(shapes)
    console.print("Nothing was loaded, generated or written.", style="dim")


def estimate(recipe: Recipe) -> DryRun:
    """All figures. Reads the target's config and tokenizer and a sample of local data; hub datasets are not touched."""
    from train.run import drafter_config, sketch_drafter

    target = sketch_target(recipe.target)
    config = drafter_config(recipe, cast(FrozenTarget, target), planning=True)
    drafter = sketch_drafter(recipe, config).prepare_training(recipe.drafter)
    parameters = {name: tuple(p.shape) for name, p in drafter.named_parameters() if p.requires_grad}
    trainable = sum(p.numel() for p in drafter.trainable_parameters())
    frozen = sum(p.numel() for p in drafter.parameters()) - trainable
    plan = DryRun(recipe, target, drafter.config, parameters, trainable, frozen, drafter.reads_last_hidden)
    count = _counter(recipe)
    plan.sources = [count(source) for source in recipe.data.train]
    plan.validation = [count(source) for source in recipe.data.validation]
    plan.steps = _steps(plan)
    plan.memory, plan.disk = _memory(plan), _disk(plan)
    return plan


# --------------------------------------------------------------------------------------------- data


def _counter(recipe: Recipe) -> Callable[[Source], TokenCount]:
    """Counts the tokens of a source with the target's tokenizer, loaded once; without one, examples only."""
    t = recipe.target
    try:
        tokenizer = load_tokenizer(t.model, None, trust_remote_code=t.trust_remote_code, revision=t.revision)
        known = bool(tokenizer("a").input_ids)  # from config.json alone transformers makes one that knows no text
    except CheckpointError:
        known = False
    if not known:
        return lambda source: TokenCount(
            source.label, note="not counted: the target's tokenizer is not on this machine"
        )
    conversations = conversation_tokenizer(recipe.data, tokenizer)

    def tokenise(example: Example) -> list[TokenRow]:
        """The rows it becomes; where its response is still to be written, as long as the one in the data."""
        r = recipe.regenerate
        rows, prompt = list[TokenRow](), list[int]()
        try:
            prompt = conversations.prompt_ids(example)
            rows = conversations.rows(example)
        except BadRow as error:
            if not (r.enabled and prompt):
                bad_rows(recipe.data).refuse(error)
                return []
        if not r.enabled:
            return rows
        response = len(rows[-1]) - len(prompt) if rows else r.max_new_tokens
        return [TokenRow.from_response(prompt, [0] * max(min(response, r.max_new_tokens), 1), example.workload)]

    def count(source: Source) -> TokenCount:
        if source.resolved().name is not None:
            return TokenCount(source.label, note="a hub dataset, not read in a dry run")
        examples = list(load_source(source, bad=BadRows()))[: source.limit]
        sample = examples[:: max(len(examples) // SAMPLE, 1)][:SAMPLE]
        found = [row for example in sample for row in tokenise(example)]
        _, statistics = fit_rows(found, recipe.data.max_length)
        scale = source.weight * len(examples) / max(len(sample), 1)
        rows, tokens, supervised = (
            round(scale * n) for n in (statistics.rows, statistics.tokens, statistics.supervised)
        )
        return TokenCount(source.label, round(source.weight * len(examples)), rows, tokens, supervised)

    return count


def _steps(plan: DryRun) -> int | None:
    t = plan.recipe.training
    if t.steps is not None:
        return t.steps
    if t.epochs is None or not plan.tokens:
        return None
    rows = plan.tokens / plan.recipe.data.max_length  # packed rows are nearly full
    if not plan.recipe.data.packing:
        rows = sum(source.rows for source in plan.sources)
    return math.ceil(rows * t.epochs / (t.batch_size * t.gradient_accumulation_steps))


# --------------------------------------------------------------------------------------------- memory and disk


def _memory(plan: DryRun) -> dict[str, int]:
    """Bytes of one process at the peak of a step."""
    recipe, config, target = plan.recipe, plan.drafter, plan.target
    B, T, K = recipe.training.batch_size, recipe.data.max_length, recipe.drafter.unroll_steps
    width = 2 if recipe.training.mixed_precision == "bf16" else 4
    per_token = config.activation_bytes(T, width, recompute=T > RECOMPUTE_FROM)
    kept = int(recipe.training.keep_features_gb * 2**30)
    chunk = recipe.training.loss_chunk_size or default_chunk_size(target.vocab_size, torch.device("cpu"))
    return {
        "target's weights": target.num_parameters * target.dtype.itemsize,
        f"drafter: weights, gradients, {recipe.training.optimizer}": plan.trainable * ADAM_BYTES,
        "drafter: weights that are not trained": plan.frozen * 4,
        f"features of {B} x {T} tokens": B * T * plan.feature_bytes,
        **({"features kept between epochs, at most": kept} if kept else {}),
        "masks of packed rows": B * T * T * (1 + 2 * target.dtype.itemsize),
        f"activations of {K} depths": B * T * K * per_token,
        f"one loss chunk of {chunk} tokens": chunk * 4 * (4 * target.vocab_size + 2 * config.draft_vocab_size),
    }


def _disk(plan: DryRun) -> dict[str, int]:
    """Bytes below the run's folder at its end."""
    recipe, config = plan.recipe, plan.drafter
    exported = plan.target.dtype if recipe.export.dtype == "auto" else getattr(torch, recipe.export.dtype)
    kept = recipe.training.keep_last
    whole = plan.trainable + plan.frozen
    alone = getattr(config, "adapter_of", None) is not None  # of a draft model
    maps = 8 * config.draft_vocab_size + config.vocab_size if config.reduced_vocabulary else 0  # d2t, t2d
    return {
        f"checkpoints ({kept} kept, one being written)": (kept + 1)
        * (plan.trainable * CHECKPOINT_BYTES + plan.frozen * 4),
        "best weights": whole * 4,
        "export": plan.trainable * 4 if alone else whole * exported.itemsize + maps,
        "responses": 7 * sum(s.supervised for s in plan.sources) if recipe.regenerate.enabled else 0,  # ids as text
    }


# --------------------------------------------------------------------------------------------- what is printed

Rows = list[tuple[str, str]]


def _sections(plan: DryRun) -> list[tuple[str, Rows]]:
    recipe = plan.recipe
    about = {"min": "at least", "max": "at most"}
    gates = [
        (name, ", ".join(f"{about[k]} {v:g}" for k, v in gate.model_dump(exclude_none=True).items()))
        for name, gate in recipe.gates.items()
    ]
    return [
        (f"{recipe.name} ({recipe.family})", _model_rows(plan)),
        ("Data", _data_rows(plan)),
        ("Training", _training_rows(plan)),
        ("Memory of one process, about", _byte_rows(plan.memory)),
        ("Disk, about", _byte_rows(plan.disk)),
        ("Gates", gates or [("none", "nothing is gated; the report is written all the same")]),
        ("Output", _output_rows(recipe)),
    ]


def _model_rows(plan: DryRun) -> Rows:
    t, d, recipe = plan.target, plan.drafter, plan.recipe
    trained = f"trained along by a LoRA of rank {recipe.joint.r}" if recipe.joint else "frozen"
    return [
        (
            "target",
            f"{t.name_or_path}: {t.config.model_type}, {t.num_layers} x {t.hidden_size}, vocabulary {t.vocab_size:,}",
        ),
        ("", f"{_count(t.num_parameters)} parameters, {trained}, {str(t.dtype).removeprefix('torch.')}"),
        ("reads", _reads(plan)),
        ("drafter", d.describe()),
        ("", f"{_count(plan.trainable)} trainable parameters, {plan.trainable / t.num_parameters:.1%} of the target's"),
        ("draft vocabulary", _vocabulary(plan)),
        ("starts from", recipe.drafter.init_from or f"{recipe.drafter.start}, as docs/{recipe.family}.md describes"),
        ("features", f"{_bytes(plan.feature_bytes)} per token, made online and never stored"),
    ]


def _reads(plan: DryRun) -> str:
    """Which of the target's states."""
    taps = plan.drafter.tap_layers
    parts = [f"taps {list(taps)} of 0..{plan.target.num_layers} (0: embedding output, i: output of layer i-1)"]
    states = parts * bool(taps) + ["the last hidden state"] * plan.reads_last_hidden
    return "; ".join(states) or "no state of the target: tokens alone"


def _vocabulary(plan: DryRun) -> str:
    d, of_target = plan.drafter, plan.target.vocab_size
    if getattr(plan.recipe.drafter, "vocab", "same") == "intersection":
        return f"of {d.vocab_size:,} tokens those that the target has too, which its tokenizer will tell"
    if d.reduced_vocabulary:
        return f"{d.draft_vocab_size:,} of the target's {d.vocab_size:,} tokens"
    padded = f", in a table of {d.vocab_size:,}" if d.vocab_size != of_target else ""
    return f"all {min(d.vocab_size, of_target):,} tokens{padded}"


def _alike(shapes: dict[str, tuple[int, ...]]) -> list[tuple[str, tuple[int, ...], int]]:
    """Tensors of one shape whose names differ in a number only, as one: name, shape, how many."""
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, shape in shapes.items():
        groups.setdefault((re.sub(r"(?<=\.)\d+(?=\.)", "*", name), shape), []).append(name)
    return [(names[0] if len(names) == 1 else like, shape, len(names)) for (like, shape), names in groups.items()]


def _data_rows(plan: DryRun) -> Rows:
    recipe = plan.recipe
    rows = [(f"train {i}" if i else "train", _source_text(s)) for i, s in enumerate(plan.sources)]
    rows += [(f"validation {i}" if i else "validation", _source_text(s)) for i, s in enumerate(plan.validation)]
    r = recipe.regenerate
    rewritten = (
        f"{_shares_text(r.temperatures)}; at most {r.max_new_tokens} tokens, counted above as long as those of the data"
    )
    where = f"by the target at {len(r.endpoints)} endpoints" if r.endpoints else "by the target"
    which = ", every turn" if r.turns == "all" else ""
    rows.append(("responses", f"{where}{which}: {rewritten}" if r.enabled else "as in the data"))
    rows.append(
        ("rows", f"{recipe.data.max_length} tokens, {'packed' if recipe.data.packing else 'one document each'}")
    )
    return rows


def _shares_text(shares: Sequence[TemperatureShare]) -> str:
    return ", ".join(f"{entry.share:.0%} at temperature {entry.temperature:g}" for entry in shares)


def _source_text(source: TokenCount) -> str:
    if source.examples is None:
        return f"{source.label}: {source.note}"
    counted = (
        f"{source.examples:,} examples, about {_count(source.tokens)} tokens, {_count(source.supervised)} supervised"
    )
    return f"{source.label}: {counted}"


def _training_rows(plan: DryRun) -> Rows:
    t, d = plan.recipe.training, plan.recipe.drafter
    per_step = t.batch_size * t.gradient_accumulation_steps * plan.recipe.data.max_length
    passes = (
        f", about {plan.steps * per_step / plan.tokens:.2g} passes over the data" if plan.steps and plan.tokens else ""
    )
    budget = (
        f"{plan.steps:,} steps{passes}" if plan.steps else "until the budget of epochs is spent" if t.epochs else ""
    )
    limit = f"at most {t.max_minutes:g} minutes" if t.max_minutes else ""
    decay = [d.step_decay**k for k in range(d.unroll_steps)]
    weights = ", ".join(f"{w / sum(decay):.2f}" for w in decay)
    return [
        ("budget", "; ".join(part for part in (budget, limit) if part)),
        (
            "a step",
            f"{per_step:,} tokens per process ({t.batch_size} rows x {t.gradient_accumulation_steps} micro-steps)",
        ),
        ("depths", f"{d.unroll_steps}, weighted {weights}"),
        ("loss", ", ".join(f"{weight} x {name}" for name, weight in plan.recipe.loss.items())),
        (
            "learning rate",
            f"{t.learning_rate:g}, {t.lr_schedule} after {t.warmup_ratio:.0%} warm-up, clip {t.max_grad_norm:g}",
        ),
        ("precision", "bf16 autocast, float32 weights" if t.mixed_precision == "bf16" else "float32"),
        *_on_policy_rows(plan.recipe),
    ]


def _on_policy_rows(recipe: Recipe) -> Rows:
    """What each stage learns from texts of the drafter in training."""
    rows: Rows = []
    for name, part in recipe.training_stages():
        if (section := part.on_policy) is None:
            continue
        share = section.share
        steps = f"{share.start:.0%}" + (f" at first, {share.end:.0%} at the end," if share.end != share.start else "")
        drafts = section.num_speculative_tokens or recipe.evaluation.num_speculative_tokens
        written = "written by the draft model itself" if part.drafter_writes() else f"{drafts} drafts per round"
        suffix = ", ".join(f"{weight} x {term}" for term, weight in section.suffix_loss.items())
        rows += [
            (
                f"on-policy{f', stage {name}' if name else ''}",
                f"{steps} of the micro-steps; {section.prompts} texts of at most {section.max_new_tokens} tokens every "
                f"{section.refresh_every} steps, {written}; "
                + _shares_text(section.temperatures or part.regenerate.temperatures),
            )
        ]
        if not part.drafter_writes():
            weight = f"{section.suffix_weight:g} x {section.suffix_decay:g}^j"
            rows.append(("", f"rejected suffixes: {suffix}, weighted {weight}"))
    return rows


def _output_rows(recipe: Recipe) -> Rows:
    folder = Path(recipe.output_dir)
    paths = [
        ("resolved recipe", "recipe.yaml"),
        ("checkpoints", "checkpoints"),
        ("drafter", "export"),
        ("measurements", "acceptance.json"),
        ("report", "report.html"),
    ]
    rows = [(name, f"{folder / path}{' (exists)' if (folder / path).exists() else ''}") for name, path in paths]
    return [*rows, ("trackers", ", ".join(recipe.trackers) or "none")]


def _byte_rows(parts: dict[str, int]) -> Rows:
    return [(name, _bytes(size)) for name, size in parts.items() if size] + [("total", _bytes(sum(parts.values())))]


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _count(number: float) -> str:
    for unit in ("", " k", " M"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} G"
