"""Drafters as folders that engines load: written whole or not at all, read back strictly.

`load_drafter` refuses a missing, unexpected or mis-shaped tensor, most of which vLLM loads
silently. One `Layout` per format and family (formats.py) defines the contents of a folder."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from draftsmith.speculators.config import DrafterConfig
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.errors import CheckpointError, ConfigError
from draftsmith.speculators.export.field_kinds import check_kinds
from draftsmith.speculators.export.formats import NATIVE, layout_for, layout_of
from draftsmith.speculators.export.headers import Header, pickled_files, read_headers
from draftsmith.speculators.export.layouts.base import FolderContents
from draftsmith.speculators.export.quantisation import quantisation_fields, split_quantisation
from draftsmith.speculators.hub import may_be_on_hub, split_revision, why_not_loaded
from draftsmith.speculators.registry import family_class
from draftsmith.speculators.target.target_head import TargetHead
from draftsmith.speculators.vocab.token_counts import load_counts, save_counts

WEIGHTS_HASH = "weights_sha256"  # of the target, in what an export says of it
BELOW_RUN = "export"  # the folder of a run's drafter, in that of the run
# What to do where a folder is not there: a run writes its drafter when it ends.
NO_FOLDER = "run the recipe first if a run writes it, or give another folder or a repository id"


def export_drafter(
    drafter: Drafter,
    folder: str | Path,
    *,
    dtype: torch.dtype,
    provenance: dict[str, Any] | None = None,
    format: str = NATIVE,
    beside: Iterable[Path] = (),
    judge: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """Writes `drafter` to `folder` in its family's layout and returns the folder.

    An export that fails leaves what was there before in place. `provenance` goes into config.json
    under `draftsmith`; its `target` (`describe_target`) is the attached one unless it says
    otherwise. `format`: one of `formats.FORMATS`; ConfigError if the family or this drafter has no
    place in it. `beside`: files that go into the folder too. `judge` is given the folder before
    it takes its place, and raises if it may not."""
    folder = Path(folder)
    written_as = layout_for(format, drafter.config.family)
    drafter = written_as.layout.fitted(drafter)
    config = drafter.config.model_copy(update={"dtype": str(dtype).removeprefix("torch.")})
    written_as.check(config, format)
    if config.quantization is not None and format != NATIVE:
        raise ConfigError(
            f"has no place for {config.quantization} weights; write {NATIVE}",
            where=f"export format {format}",
        )
    _require_values(drafter, dtype, folder)
    fields = written_as.layout.to_config(config) | quantisation_fields(config.quantization)
    if drafter.attached:
        fields["draftsmith"]["target"] = describe_target(drafter.target)
    fields["draftsmith"] |= (provenance or {}) | ({"format": format} if format != NATIVE else {})
    fields = written_as.to_engine(fields)
    fields["draftsmith"] = fields.pop("draftsmith")  # the last section
    with fresh_folder(folder) as fresh:
        written_as.write(drafter, config, fresh, dtype)
        if drafter.token_counts is not None:
            save_counts(drafter.token_counts, fresh)
        for file in beside:
            shutil.copyfile(file, fresh / file.name)
        (fresh / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
        judge(fresh)
    return folder


def _require_values(drafter: Drafter, dtype: torch.dtype, folder: Path) -> None:
    """CheckpointError for a tensor with values that the dtype has not."""
    for name, tensor in drafter.state_dict().items():
        if tensor.is_floating_point() and not tensor.to(dtype).isfinite().all():
            raise CheckpointError(
                f"{name} has values that are not finite in {str(dtype).removeprefix('torch.')};"
                " give another --dtype, such as bfloat16, if they are finite elsewhere",
                where=f"{folder}",
            )


def describe_target(target: Any) -> dict[str, Any]:
    """The target's fields in an export: the name, and the whole class."""
    names = getattr(target.model.config, "architectures", None) or [type(target.model).__name__]
    return {"name_or_path": target.name_or_path, "architectures": list(names)}


def other_target(fields: Mapping[str, Any], weights: str) -> str | None:
    """What to warn of if a drafter with these `fields` of config.json was trained for a target of
    other weights than those with the sha256 `weights`; None: it was not, or does not say."""
    target = (fields.get("draftsmith") or {}).get("target") or {}
    if target.get(WEIGHTS_HASH) in (None, weights):
        return None
    return (
        f"it was trained for {target.get('name_or_path')} with other weights than this target has:"
        " fewer drafts are accepted; serve it with its own target, or train it for this one"
    )


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """The errors of safetensors, of torch and of a file without a name that mean the disk, as an
    OSError with `path` as its `filename`."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
    except RuntimeError as error:
        if "inline_container" not in str(error):  # of torch.save
            raise
        cause = error.__context__
        number = cause.errno if isinstance(cause, OSError) and cause.errno else errno.ENOSPC
        raise OSError(number, os.strerror(number), str(path)) from error


def check_replaceable(out: Path, source: Path, *, target: bool = False) -> None:
    """ConfigError if a drafter (`target`: a model) that is written to `out` would take the place of
    anything else: of `source`, from which it is made, or of a run or a model."""
    place = out.resolve()
    if place == source.resolve() or place in source.resolve().parents:
        raise ConfigError(
            f"{out} is, or holds, {source}, which is read; name another folder to write",
            where="export",
        )
    config = out / "config.json"
    ours = config.is_file() and (target or "draftsmith" in read_fields(out))
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not ours):
        raise ConfigError(
            f"{out} holds something else, which would go; name a folder that is new or empty, or"
            " that an export wrote",
            where="export",
        )


@contextmanager
def fresh_folder(folder: Path) -> Iterator[Path]:
    """A new folder to write into, which replaces `folder`, or what it links to, unless there is an
    error. OSError with `folder` as its `filename` where the disk is at fault."""
    if folder.is_symlink():
        folder = folder.resolve()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:  # it names the scratch
        raise OSError(error.errno, error.strerror, str(folder)) from error
    try:
        with disk_errors(folder):
            yield fresh
            fresh.chmod(0o755)
            # safetensors writes files that only their owner reads; a server may be another user
            for file in fresh.rglob("*"):
                file.chmod(0o755 if file.is_dir() else 0o644)
            replace_folder(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def replace_folder(fresh: Path, folder: Path) -> None:
    """Moves `fresh` to `folder`, whose old contents go last."""
    old = folder.with_name(f".{folder.name}-old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    try:
        os.rename(fresh, folder)
    except OSError:
        if old.exists():
            os.rename(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def resolve(
    path_or_id: str | Path,
    revision: str | None = None,
    *,
    weights: bool = True,
    what: str = "drafter",
) -> Path:
    """The local folder, or the JSON and safetensors of `org/name` or `org/name@revision`,
    downloaded from the Hub. `what`: the first word of its CheckpointError."""
    if Path(path_or_id).is_dir():
        return Path(path_or_id)
    from huggingface_hub import snapshot_download

    name, revision = split_revision(str(path_or_id), revision)
    where = f"{what} {path_or_id}"
    if not may_be_on_hub(name):
        raise CheckpointError(f"no such folder; {NO_FOLDER}", where=where)
    patterns = ["*.json", "*.safetensors"] if weights else ["config.json"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (ValueError, OSError) as error:  # no id; the Hub's errors, and those of files
        raise CheckpointError(f"{why_not_loaded(name, error)}; {NO_FOLDER}", where=where) from error


def _headers(folder: Path) -> dict[str, Header]:
    """Every tensor's header; CheckpointError for a folder without config.json or safetensors."""
    if not (folder / "config.json").exists() or not any(folder.glob("*.safetensors")):
        hint = "".join(
            f"; {name} is a pickle, which is never opened: convert it to safetensors first"
            for name in pickled_files(folder)
        )
        if (folder / BELOW_RUN / "config.json").is_file():
            hint += f"; this is a run's folder: give {folder / BELOW_RUN}"
        raise CheckpointError(
            f"expected config.json and *.safetensors{hint}", where=f"drafter {folder}"
        )
    return read_headers(folder)


def read_drafter_config(
    path_or_id: str | Path, num_target_layers: int | None = None, *, config_only: bool = False
) -> DrafterConfig:
    """The configuration of an exported or published drafter, without its weights.

    `num_target_layers` is needed only for heads whose config.json does not say which layers they
    tap. `config_only`: the tensors need not be there. Right for whole language models; of a head
    they may say what config.json does not."""
    folder = resolve(path_or_id, weights=not config_only)
    names = set() if config_only else set(_headers(folder))
    fields, quantization = split_quantisation(read_fields(folder))
    where = f"{folder}/config.json"
    written_as = layout_of(fields, names, str(folder))
    plain = written_as.from_engine(fields, where)
    config = written_as.layout.from_config(FolderContents(plain, names, where, num_target_layers))
    return config.model_copy(update={"quantization": quantization})


def read_fields(path_or_id: str | Path) -> dict[str, Any]:
    """The fields of a drafter's config.json."""
    folder = resolve(path_or_id, weights=False)
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError("expected config.json", where=f"drafter {folder}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"not JSON: {error}", where=f"{folder}/config.json") from error
    if not isinstance(fields, dict):
        raise CheckpointError("expected a JSON object", where=f"{folder}/config.json")
    check_kinds(fields, f"{folder}/config.json")
    return fields


def load_drafter(
    path_or_id: str | Path, target: TargetHead, *, dtype: torch.dtype | None = None
) -> Drafter:
    """The drafter of an exported folder, attached to `target`, in evaluation mode, in the target's
    dtype and device.

    CheckpointError names every tensor that is missing, unexpected or of another shape; ConfigError
    a target it was not made for."""
    folder = resolve(path_or_id)
    config = read_drafter_config(folder, target.num_layers)
    drafter = family_class(config.family)(config).attach(target)
    load_weights(drafter, folder)
    return drafter.to(device=target.device, dtype=dtype or target.dtype).freeze()


def load_weights(drafter: Drafter, folder: Path) -> None:
    """Fills all of `drafter` from the tensors of `folder`, strictly."""
    headers = _headers(folder)
    fields = read_fields(folder)
    layout_of(fields, set(headers), str(folder)).layout.read(drafter, folder)
    drafter.token_counts = load_counts(folder)
