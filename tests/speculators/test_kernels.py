"""The switch that goes without fused kernels, and the error that names it."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from draftsmith.speculators import kernels
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.layers import flex_attention


def test_the_switch_names_the_parts_that_use_their_kernels(monkeypatch):
    every = set(kernels.PARTS)
    monkeypatch.delenv("DRAFTSMITH_KERNELS", raising=False)
    assert {part for part in kernels.PARTS if kernels.enabled(part)} == every
    for setting, parts in [("none", set()), ("", set()), (" attention, none", {"attention"})]:
        monkeypatch.setenv("DRAFTSMITH_KERNELS", setting)
        assert {part for part in kernels.PARTS if kernels.enabled(part)} == parts


def test_a_switch_that_names_no_part_is_an_error(monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_KERNELS", "atention")
    with pytest.raises(ConfigError) as caught:
        kernels.enabled("attention")
    assert caught.value.where == "DRAFTSMITH_KERNELS"


def test_attention_that_the_switch_leaves_out_has_no_kernels(monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_KERNELS", "none")
    keys = torch.zeros(1, 1, 4, 16)
    assert "DRAFTSMITH_KERNELS" in flex_attention.why_not(keys, keys)


def test_triton_needs_a_c_compiler_and_the_headers_of_python(monkeypatch, tmp_path):
    """Which containers of CUDA's runtime and slim ones of Python lack."""
    monkeypatch.setattr(kernels, "find_spec", lambda name: object())
    monkeypatch.setattr(kernels.sysconfig, "get_path", lambda name, scheme: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    why_not = kernels.why_not_triton.__wrapped__
    assert "in CC" in why_not()
    monkeypatch.setenv("CC", "cc")
    assert str(tmp_path / "Python.h") in why_not()
    (tmp_path / "Python.h").touch()
    assert why_not() is None


def test_a_kernel_that_fails_names_the_setting_without_it(monkeypatch):
    def failing(*_, **__):
        raise RuntimeError("no shared memory")

    monkeypatch.setattr(flex_attention, "flex_attention", failing)
    keys = torch.zeros(1, 1, 4, 16)
    with pytest.raises(kernels.KernelError, match="DRAFTSMITH_KERNELS=") as caught:
        flex_attention.attend_context(keys, keys, keys, None, 1.0)
    assert caught.value.where == "DRAFTSMITH_KERNELS"


def test_memory_that_is_out_is_no_failure_of_a_kernel():
    with pytest.raises(torch.OutOfMemoryError), kernels.of_part("attention"):
        raise torch.OutOfMemoryError


def test_a_backward_pass_that_cannot_be_compiled_names_the_setting_and_others_do_not():
    failure = RuntimeError("in the backward pass")
    failure.__cause__ = BackendCompilerFailed(lambda: None, ValueError("no kernel"), None)
    named = pytest.raises(kernels.KernelError, match="DRAFTSMITH_KERNELS=none")
    with named, kernels.of_compilers():
        raise failure
    with pytest.raises(ZeroDivisionError), kernels.of_compilers():
        raise ZeroDivisionError


def test_what_reads_little_is_not_compiled(monkeypatch):
    monkeypatch.setattr(kernels, "serves", lambda part, device: True)
    monkeypatch.setattr(kernels, "LEAST_NUMBERS", 4)
    assert kernels.on_device("layers", torch.sin, torch.zeros(3)) is torch.sin
    assert kernels.on_device("layers", torch.sin, torch.zeros(4)) is not torch.sin
