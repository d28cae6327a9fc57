"""`--dry-run` prints what a recipe would do before any weight is loaded: the recipe with every
default written out, then shapes, tokens, steps, memory and disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from inference.console import size_text
from train.planner.outline import Outline
from train.planner.plan import disk, training_memory

Rows = Sequence[tuple[str, str]]


def describe(plan: Outline, console: Console | None = None) -> None:
    """Prints what a run of this recipe would do."""
    console, recipe = console or Console(), plan.recipe
    console.print(recipe.resolved_yaml(), markup=False, highlight=False, soft_wrap=True)
    print_pairs(console, f"{recipe.name} ({recipe.family})", _model_rows(plan))
    print_pairs(console, "Training", _training_rows(plan))
    trained = [(n, p.shape) for n, p in plan.head.named_parameters() if p.requires_grad]
    shapes = [(name, " x ".join(map(str, shape))) for name, shape in trained]
    print_pairs(console, "Trained tensors", shapes)
    memory = byte_rows(training_memory(plan))
    print_pairs(console, "Memory of one process while it trains, about", memory)
    print_pairs(console, "Disk, about", byte_rows(disk(plan)))
    console.print("Nothing was loaded, generated or written.", style="dim")


def _model_rows(plan: Outline) -> Rows:
    t, d, recipe = plan.target, plan.drafter, plan.recipe
    features = f"{size_text(plan.feature_bytes)} per token, made online and never stored"
    if recipe.features.mode == "cache":
        whole = size_text(plan.cached_bytes * plan.tokens)
        features = f"{size_text(plan.cached_bytes)} per token on disk, about {whole} in all"
    start = recipe.drafter.init_from or f"{recipe.drafter.start} (docs/{recipe.family}.md)"
    return [
        ("target", f"{t.name_or_path}: {t.config.model_type}, {t.num_layers} x {t.hidden_size}"),
        ("", f"{in_count(t.num_parameters)} parameters, vocabulary {t.vocab_size:,}, {t.dtype}"),
        ("taps", f"{list(d.tap_layers)} (0: embedding output, i: output of layer i-1)"),
        ("drafter", f"{d.describe()}; {in_count(plan.trainable)} trained parameters"),
        ("draft vocabulary", f"{d.draft_vocab_size:,} of {d.vocab_size:,} tokens"),
        ("starts from", str(start)),
        ("features", features),
    ]


def _training_rows(plan: Outline) -> Rows:
    shared, steps = plan.step_rows(), plan.steps()
    budget = f"{steps:,} steps" if steps else "until the budget of epochs or minutes is spent"
    tokens = shared.rows_per_step * plan.recipe.data.max_length
    rows = [
        (
            "data",
            f"{s.label}: {s.note}"
            if s.examples is None
            else f"{s.label}: {s.examples:,} examples, about {in_count(s.tokens)} tokens,"
            f" {in_count(s.supervised)} supervised",
        )
        for s in (*plan.sources, *plan.validation)
    ]
    step = f"{tokens:,} tokens ({shared.rows} rows x {shared.micro_steps} micro-steps)"
    return [
        *rows,
        ("budget", budget),
        ("settings", _settings(plan)),
        ("a step", step),
        ("precision", str(plan.autocast)),
    ]


def _settings(plan: Outline) -> str:
    """Optimizer and learning rates, and whose they are."""
    steps, given = plan.steps(), plan.recipe.training
    chosen = plan.recipe.for_steps(steps).training
    rates = f"{chosen.optimizer}, learning rate {chosen.learning_rate:g}"
    if chosen.optimizer == "muon":
        rates += f", {chosen.muon_learning_rate:g} for matrices"
    if given.settings == "given":
        return f"{rates}: the recipe's"
    if given.is_short(steps):
        return f"{rates}: of a short run (training.settings: given keeps the published ones)"
    return f"{rates}: the published ones"


def print_pairs(console: Console, title: str, rows: Rows) -> None:
    """A table of names and values."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    table.show_header = table.pad_edge = False
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, escape(value))
    console.print(table)
    console.print()


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
