"""The target of a run: its head at all times, the whole of it while something decodes or computes
here."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate import Accelerator
from accelerate.utils import gather_object

from draftsmith.inference.progress import Stages
from draftsmith.inference.report.schema import OUR_ENGINE
from draftsmith.speculators.errors import (
    CheckpointError,
    QuantisedTensors,
    UnsupportedTarget,
)
from draftsmith.speculators.hub import split_revision
from draftsmith.speculators.precision import free_memory
from draftsmith.speculators.target.checkpoint_tensors import Checkpoint
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.target.longrope import remark, trained_length
from draftsmith.speculators.target.sharding import read_sharded
from draftsmith.speculators.target.target_head import TargetHead
from draftsmith.train.pipeline.data_stage import starts_sharded
from draftsmith.train.recipe.recipe import Recipe
from draftsmith.train.trainer.parallel import target_mesh


class RunTarget:
    """The target that a run trains a drafter for.

    Where features come from the disk or from servers, the training needs embedding, final norm and
    output head alone (`head`). The whole is loaded when a response or a feature is missing that
    this process has to write (`whole`), and is gone when they are there (`release`). A run whose
    training computes or decodes with the target has it from its start to its end (`stays`)."""

    def __init__(
        self, recipe: Recipe, accelerator: Accelerator, tap_layers: Sequence[int], stages: Stages
    ) -> None:
        self.recipe = recipe
        self.accelerator = accelerator
        self.tap_layers = tap_layers
        self.stages = stages
        self.stays = recipe.trains_with_decoder
        self._whole: FrozenTarget | None = None
        sketch = recipe.target.sketch(accelerator.device)
        if (length := trained_length(sketch.config, recipe.data.max_length)) is not None:
            stages.say(f"      {remark(sketch.config, length)}")
        self.head: TargetHead = self.whole() if self.stays else self._load_head()

    @property
    def held(self) -> FrozenTarget | None:
        """The whole target of a run that keeps it; None: `whole` loads it where it is needed."""
        return self._whole if self.stays else None

    def whole(self) -> FrozenTarget:
        """Loads the whole target, unless it is there. UnsupportedTarget: see
        `require_abilities`."""
        if self._whole is None:
            if not self.stays:
                self.head.to("cpu")  # the whole has these tensors too
            self._whole = load_target(self.recipe, self.accelerator, self.tap_layers, self.stages)
            require_abilities(self.recipe, self._whole)
        return self._whole

    def release(self) -> None:
        """Frees the decoder, unless the training needs it; the head is on the device again."""
        if self._whole is not None and not self.stays:
            self._whole = None
            free_memory()
            self.head.to(self.accelerator.device)

    def _load_head(self) -> TargetHead:
        name = self.recipe.target.model
        try:
            with self.stages.stage(f"load embedding, final norm and output head of {name}"):
                return TargetHead.from_pretrained(
                    name,
                    tap_layers=self.tap_layers,
                    dtype=self.recipe.target.dtype,
                    device=self.accelerator.device,
                    **self.recipe.target.source,
                )
        except UnsupportedTarget as error:
            # Where servers give the states, this process may be too small for the whole.
            if isinstance(error, QuantisedTensors) and self.recipe.features.endpoints:
                raise
            self.stages.say(f"      the whole target is loaded and kept: {error}")
            self.stays = True
            return self.whole()


def load_target(
    recipe: Recipe, accelerator: Accelerator, tap_layers: Sequence[int], stages: Stages
) -> FrozenTarget:
    """The target on the device of this process, or sharded over all of them. All processes come
    here together."""
    with stages.stage(f"load {recipe.target.model}"):
        target = None
        in_shards = starts_sharded(recipe, accelerator)
        if in_shards:
            target = _load_sharded(recipe, accelerator, tap_layers, stages)
        if target is None:
            target = FrozenTarget.from_pretrained(
                recipe.target.model,
                tap_layers=tap_layers,
                dtype=recipe.target.dtype,
                device=accelerator.device,
                on_host=in_shards,  # until it is sharded
                **recipe.target.source,
            )
    if (length := trained_length(target.config, recipe.data.max_length)) is not None:
        target.serve_up_to(length)
    return target


def _load_sharded(
    recipe: Recipe, accelerator: Accelerator, tap_layers: Sequence[int], stages: Stages
) -> FrozenTarget | None:
    """The target, read layer by layer. None in every process if one of them cannot."""
    name = recipe.target.model
    source = recipe.target.source
    mesh = target_mesh(accelerator)
    model = None
    fault = ""
    try:
        model = read_sharded(
            name, mesh, dtype=recipe.target.dtype, device=accelerator.device, **source
        )
    except (CheckpointError, UnsupportedTarget) as error:
        fault = str(error)
    if any(faults := gather_object([fault])):
        why = next(filter(None, faults))
        stages.say(f"      every process reads the whole target into the host's memory: {why}")
        return None
    assert model is not None  # there is no fault
    target = FrozenTarget(model, tap_layers)
    target.checkpoint = Checkpoint(*split_revision(name, recipe.target.revision))
    return target


def require_abilities(recipe: Recipe, target: FrozenTarget) -> None:
    """UnsupportedTarget if the recipe has the target decode and it gives features alone."""
    keys = set[str]()  # of the recipe, that have it decode
    for _, part in recipe.training_stages():
        parts = {
            "regenerate.enabled": part.regenerate.enabled,
            "data.validation": part.data.validation,
        }
        if not part.regenerate.endpoints:
            keys |= {key for key, decodes in parts.items() if decodes}
        if part.on_policy:
            keys.add("on_policy")
    if OUR_ENGINE in recipe.evaluation.engines and recipe.measured:
        keys.add("evaluation.engines: [draftsmith]")
    if keys:
        target.require_rollback(", ".join(sorted(keys)))
