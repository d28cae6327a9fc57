"""`--dry-run` prints what a recipe would do, before any weight is loaded or a token is generated.

First comes the recipe with every default written out, then what follows from it: shapes, tokens and
steps (train/planner/outline.py), memory and disk (train/planner/memory.py). `draftsmith plan` adds
time and money."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from inference.console import size_text
from train.planner.memory import StageMemory, disk, training_memory
from train.planner.outline import Outline
from train.planner.token_counts import TokenCount


def describe(plan: Outline, console: Console | None = None) -> None:
    """Prints what a run of this recipe would do."""
    console = console or Console()
    console.print(plan.recipe.resolved_yaml(), markup=False, highlight=False, soft_wrap=True)
    for title, rows in _sections(plan):
        print_pairs(console, title, rows)
    shapes = Table(
        "tensor",
        "shape",
        title="Trained tensors",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
    )
    for name, shape, count in _alike(
        {n: tuple(p.shape) for n, p in plan.head.named_parameters() if p.requires_grad}
    ):
        shapes.add_row(
            name, " x ".join(map(str, shape)) + (f"  ({count} of them)" if count > 1 else "")
        )
    console.print(shapes)
    console.print("Nothing was loaded, generated or written.", style="dim")


def print_pairs(console: Console, title: str, rows: Sequence[tuple[str, str]]) -> None:
    """A table of names and values."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        show_header=False,
        pad_edge=False,
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, escape(value))
    console.print(table)
    console.print()


# --------------------------------------------------------------------------------------------- what
# is printed

Rows = list[tuple[str, str]]


def _sections(plan: Outline) -> list[tuple[str, Rows]]:
    return [
        (f"{plan.recipe.name} ({plan.recipe.family})", _model_rows(plan)),
        ("Data", _data_rows(plan)),
        ("Training", _training_rows(plan)),
        ("Memory of one process while it trains, about", memory_rows(training_memory(plan))),
        ("Disk, about", byte_rows(disk(plan))),
    ]


def _model_rows(plan: Outline) -> Rows:
    t, d, recipe = plan.target, plan.drafter, plan.recipe
    trained = f"trained along by a LoRA of rank {recipe.joint.r}" if recipe.joint else "frozen"
    shape = f"{t.config.model_type}, {t.num_layers} x {t.hidden_size}, vocabulary {t.vocab_size:,}"
    return [
        ("target", f"{t.name_or_path}: {shape}"),
        (
            "",
            (
                f"{in_count(t.num_parameters)} parameters, {trained},"
                f" {str(t.dtype).removeprefix('torch.')}"
            ),
        ),
        ("reads", _reads(plan)),
        ("drafter", d.describe()),
        (
            "",
            (
                f"{in_count(plan.trainable)} trained parameters,"
                f" {plan.trainable / t.num_parameters:.1%} of the target's"
            ),
        ),
        ("draft vocabulary", _vocabulary(plan)),
        (
            "starts from",
            recipe.drafter.init_from
            or f"{recipe.drafter.start}, as docs/{recipe.family}.md describes",
        ),
        ("features", _features(plan)),
    ]


def _features(plan: Outline) -> str:
    section = plan.recipe.features
    if section.mode == "online":
        return f"{size_text(plan.feature_bytes)} per token, made online and never stored"
    whole = size_text(plan.cached_bytes * plan.tokens)
    return (
        f"{size_text(plan.cached_bytes)} per token on disk ({section.described()}), about {whole}"
        " in all"
    )


def _reads(plan: Outline) -> str:
    """The target's states that the drafter reads."""
    taps = plan.drafter.tap_layers
    parts = [
        f"taps {list(taps)} of 0..{plan.target.num_layers} (0: embedding output, i: output of layer"
        " i-1)"
    ]
    states = parts * bool(taps) + ["the last hidden state"] * plan.head.reads_last_hidden
    return "; ".join(states) or "no state of the target: tokens alone"


def _vocabulary(plan: Outline) -> str:
    d, of_target = plan.drafter, plan.target.vocab_size
    if getattr(plan.recipe.drafter, "vocab", "same") == "intersection":
        return (
            f"of {d.vocab_size:,} tokens those that the target has too, which its tokenizer will"
            " tell"
        )
    if d.reduced_vocabulary:
        return f"{d.draft_vocab_size:,} of the target's {d.vocab_size:,} tokens"
    padded = f", in a table of {d.vocab_size:,}" if d.vocab_size != of_target else ""
    return f"all {min(d.vocab_size, of_target):,} tokens{padded}"


def _alike(shapes: dict[str, tuple[int, ...]]) -> list[tuple[str, tuple[int, ...], int]]:
    """Joins tensors of one shape whose names differ in a number only: name, shape, how many."""
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, shape in shapes.items():
        groups.setdefault((re.sub(r"(?<=\.)\d+(?=\.)", "*", name), shape), []).append(name)
    return [
        (names[0] if len(names) == 1 else like, shape, len(names))
        for (like, shape), names in groups.items()
    ]


def _data_rows(plan: Outline) -> Rows:
    named = [("train", s) for s in plan.sources] + [("validation", s) for s in plan.validation]
    return [(name, _source_text(source)) for name, source in named]


def _source_text(source: TokenCount) -> str:
    if source.examples is None:
        return f"{source.label}: {source.note}"
    tokens, supervised = in_count(source.tokens), in_count(source.supervised)
    return (
        f"{source.label}: {source.examples:,} examples, about {tokens} tokens, {supervised}"
        " supervised"
    )


def _training_rows(plan: Outline) -> Rows:
    t, shared, steps = plan.recipe.training, plan.step_rows(), plan.steps()
    per_step = shared.rows_per_step * plan.recipe.data.max_length
    passes = (
        f", about {steps * per_step / plan.tokens:.2g} passes over the data"
        if steps and plan.tokens
        else ""
    )
    budget = (
        f"{steps:,} steps{passes}" if steps else "until the budget of epochs or minutes is spent"
    )
    over = "per process" if t.global_batch_size is None else "over all processes"
    return [
        ("budget", budget),
        (
            "a step",
            f"{per_step:,} tokens {over} ({shared.rows} rows x {shared.micro_steps} micro-steps)",
        ),
        (
            "precision",
            "bf16 autocast, float32 weights" if plan.autocast == torch.bfloat16 else "float32",
        ),
    ]


def memory_rows(stage: StageMemory) -> Rows:
    """The memory at the peak of a stage."""
    return byte_rows(stage.parts | {"fragmentation": stage.allowance})


def byte_rows(parts: Mapping[str, int]) -> Rows:
    """Every part that takes memory, and their sum."""
    whole = {name: size for name, size in parts.items() if size} | {"total": sum(parts.values())}
    return [(name, size_text(size)) for name, size in whole.items()]


def in_count(number: float) -> str:
    for unit in ("", " k", " M"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} G"
