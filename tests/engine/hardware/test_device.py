"""How "auto" is decided."""

from importlib.util import find_spec

import pytest
import torch

from engine.hardware import device
from engine.hardware.device import resolve_device


def cpu_with(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(device, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("flags", "half", "dtype"),
    [
        (("avx512f", "amx_bf16"), False, "bfloat16"),
        (("avx512_bf16",), False, "bfloat16"),
        (("avx512f",), True, "bfloat16"),  # held in 16 bits and multiplied in float32
        ((), True, "bfloat16"),
        (("avx512f",), False, "float32"),
        ((), False, "float32"),
    ],
)
def test_a_cpu_takes_bf16_where_it_gains_from_it(monkeypatch, flags, half, dtype):
    cpu_with(monkeypatch, *flags)
    monkeypatch.setattr(device, "half_packing_works", lambda: half)
    facts = resolve_device()
    assert ("computed in float32" in facts.why) == (half and not facts.native_bf16)
    assert (facts.device, facts.dtype, facts.attention_backend) == ("cpu", dtype, "torch")
    assert facts.type == "cpu" and facts.torch_dtype == getattr(torch, dtype)
    assert "no CUDA device" in facts.why and dtype in facts.why
    assert facts.threads == torch.get_num_threads()
    assert set(facts.as_dict()) >= {"device", "dtype", "attention_backend", "threads", "name", "why"}


@pytest.mark.parametrize(("capability", "dtype"), [((9, 0), "bfloat16"), ((8, 0), "bfloat16"), ((7, 5), "float16")])
def test_cuda_is_taken_where_it_is(monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    facts = resolve_device()
    assert (facts.device, facts.dtype, facts.name) == ("cuda:1", dtype, "a GPU")
    assert facts.attention_backend == ("triton" if capability >= (8, 0) and find_spec("triton") else "torch")
    assert resolve_device(attention_backend="torch").attention_backend == "torch"
    assert resolve_device("cuda").device == "cuda:0"
    with pytest.raises(ValueError, match="2 CUDA device"):
        resolve_device("cuda:2")


def test_what_is_asked_for_is_taken_and_said(monkeypatch):
    cpu_with(monkeypatch)
    facts = resolve_device("cpu", "bfloat16", "torch")
    assert facts.dtype == "bfloat16" and "'bfloat16' was asked for" in facts.why


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tpu",), "device must be"),
        (("mps",), "device must be"),
        (("cuda:99",), "is not there"),
        (("cpu", "int8"), "dtype must be one of"),
        (("cpu", "auto", "flash"), "attention_backend must be one of"),
        (("cpu", "auto", "triton"), "needs CUDA"),
    ],
)
def test_what_is_not_there_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        resolve_device(*arguments)


def test_without_triton_attention_is_torchs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: None)
    facts = resolve_device()
    assert facts.attention_backend == "torch" and "Triton is not installed" in facts.why
    with pytest.raises(ValueError, match="needs Triton, which is not installed"):
        resolve_device(attention_backend="triton")


def test_this_machine_is_described():
    assert device.cpu_name()
    assert isinstance(device.cpu_flags(), frozenset)
