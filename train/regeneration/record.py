"""The record beside the responses of a store: their target, template and sampling settings, their
writers, and the account of all wanted responses.

The record names servers by their address. `summary`, which goes into an export, does not.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inference.provenance import package_version
from speculators.errors import DataError
from train.recipe.data_sections import RegenerateSection
from train.regeneration.conversations import Account
from train.regeneration.store import write_json

SUMMARY = "regeneration.json"  # in a run's folder
PUBLIC = ("version", "here", "agreement", "written")  # fields of a writer in the summary
SAMPLING = {"temperatures", "top_p", "top_k", "max_new_tokens", "seed"}


@dataclass(frozen=True)
class Record:
    """The target's part of responses/<hash>.json."""

    target: str
    revision: str | None
    target_hash: str  # of its weights, its config and the chat template
    chat_template_sha256: str | None
    chat_template_kwargs: Mapping[str, Any]

    def write(
        self, path: Path, section: RegenerateSection, account: Account, writer: Mapping[str, Any]
    ) -> None:
        """Adds the writer of this run to those of earlier ones. A run that only read responses
        changes nothing."""
        if path.exists() and not (account.written or account.failed):
            return
        writers = _read(path).get("written_by", [])
        if account.written:
            mine = writer.get("endpoints")
            if mine is None:
                mine = [
                    {
                        "url": None,
                        "version": package_version(),
                        **writer,
                        "written": account.written,
                    }
                ]
            writers = _joined([*writers, *mine])
        write_json(
            path,
            {
                **asdict(self),
                "chat_template_of": (
                    "server" if section.endpoints and section.exchange == "text" else "target"
                ),
                **section.model_dump(mode="json", include=SAMPLING | {"turns", "exchange"}),
                "account": account.to_dict(),
                "written_by": writers,
            },
        )


def _joined(writers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per writer, with the sums of its responses and faults."""
    joined: dict[str, dict[str, Any]] = {}
    for writer in writers:
        name = json.dumps([writer.get(key) for key in ("url", "model", "root", "version", "here")])
        before = joined.get(name, {"written": 0})
        joined[name] = before | writer | {"written": before["written"] + writer["written"]}
        if "faults" in writer:
            faults = Counter(before.get("faults", {})) + Counter(writer["faults"])
            joined[name]["faults"] = dict(sorted(faults.items()))
    return list(joined.values())


def keep_summary(folder: Path, record: Path) -> None:
    """Copies the record of a run's responses, and those of its parts, into the run's folder,
    without addresses, names and folders."""
    if not (tree := _read(record)):
        return
    parts = [_read(path) for path in sorted(record.parent.glob(f"{record.stem}.*-of-*.json"))]
    writers = _joined([writer for one in (tree, *parts) for writer in one["written_by"]])
    writers = [{key: value for key, value in writer.items() if key in PUBLIC} for writer in writers]
    del tree["target"], tree["revision"]  # the export names them
    write_json(
        folder / SUMMARY, _read(folder / SUMMARY) | {record.stem: tree | {"written_by": writers}}
    )


def summary(folder: Path) -> dict[str, Any]:
    """{"responses": …} of a run whose responses were written by the target; {} of others."""
    return {"responses": tree} if (tree := _read(folder / SUMMARY)) else {}


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}); remove it, and it is written again") from None
