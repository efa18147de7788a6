"""Which number format runs where."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runner import precision as precision_module
from runner.precision import Precision

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _restored_matmul_precision() -> object:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def pretend_cpuinfo(monkeypatch: pytest.MonkeyPatch, path: Path, text: str | None) -> None:
    cpuinfo = path / "cpuinfo"
    if text is not None:
        cpuinfo.write_text(text)
    monkeypatch.setattr(precision_module, "CPUINFO", cpuinfo)


@pytest.mark.parametrize(
    ("cpuinfo", "mode"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 sse", "bf16"),
        ("flags\t\t: fpu amx_bf16", "bf16"),
        ("Features\t: fp asimd bf16 i8mm", "bf16"),
        ("flags\t\t: fpu avx512f avx2", "fp32"),
        ("model name: avx512_bf16", "fp32"),
        (None, "fp32"),
    ],
)
def test_auto_is_bf16_where_the_cpu_multiplies_it(
    cpuinfo: str | None, mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend_cpuinfo(monkeypatch, tmp_path, cpuinfo)
    assert Precision(mode="auto").resolve(CPU) == mode


def test_formats_of_each_mode() -> None:
    x = torch.ones(2, 2)
    for mode, product, stored in (
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.bfloat16, torch.float32),
        ("bf16_master", torch.float32, torch.bfloat16),
    ):
        precision = Precision(mode=mode)  # type: ignore[arg-type]
        context = precision.autocast(CPU)
        for _ in range(2):  # a factory: each call gives a context that may be entered, also inside another
            with context():
                with context():
                    assert (x @ x).dtype == product
                assert (x @ x).dtype == product
        assert (x @ x).dtype == torch.float32
        assert precision.param_dtype(CPU) == stored


def test_a_context_inside_of_others_puts_back_what_it_found() -> None:
    context = Precision(mode="bf16").autocast(CPU)

    def setting() -> tuple[bool, torch.dtype]:
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    outside = setting()
    with context():
        bf16 = setting()
        with torch.autocast("cpu", dtype=torch.float16), torch.autocast("cpu", enabled=False):
            off = setting()
            with context():
                assert setting() == bf16
            assert setting() == off
        assert setting() == bf16
    assert setting() == outside


def test_apply_takes_onednn_only_in_full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, library, setting in ((3e-7, "onednn", "medium"), (3e-3, "torch", "highest")):
        monkeypatch.setattr(precision_module, "_matmul_error", lambda error=error: error)
        assert Precision(mode="fp32").apply(CPU) == {"mode": "fp32", "fp32_matmul": library}
        assert torch.get_float32_matmul_precision() == setting
    assert Precision(mode="fp32", cpu_library="torch").apply(CPU)["fp32_matmul"] == "torch"


def test_applied_products_are_single_precision() -> None:
    Precision(mode="fp32").apply(CPU)
    a, b = torch.randn(300, 200), torch.randn(200, 100)
    exact = a.double() @ b.double()
    assert ((a @ b).double() - exact).norm() / exact.norm() < 2e-6


def test_fp8_is_refused_without_the_hardware() -> None:
    with pytest.raises(ValueError, match=r"precision\.mode=fp8 needs a CUDA device .* use precision=bf16"):
        Precision(mode="fp8").resolve(CPU)


def test_convert_leaves_other_modes_alone() -> None:
    model = torch.nn.Linear(2, 2)
    Precision(mode="bf16").convert(model, device=CPU)
    assert type(model) is torch.nn.Linear
