"""Dense matrix throughput of GPUs in TFLOP/s, by the exact name that the driver reports; data only."""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """One chip generation at the size and clock that its peaks were published for; None = no figure."""

    tf32: float
    bf16: float | None
    fp16: float
    cores: int  # tensor cores
    mhz: int


VOLTA = Family(125.0, None, 125.0, 640, 1530)  # first column: fp16, there is no TF32
AMPERE_DATACENTER = Family(156.0, 312.0, 312.0, 432, 1410)
AMPERE_CONSUMER = Family(40.0, 80.0, 80.0, 336, 1860)  # fp32 accumulate
HOPPER = Family(378.0, 756.0, 756.0, 456, 1620)
ADA = Family(82.6, 165.2, 165.2, 512, 2520)  # fp32 accumulate

# llm.c's table (llmc/mfu.h): peaks scale with cores and clock. Name: family, tensor cores, boost MHz.
SCALED: dict[str, tuple[Family, int, int]] = {
    "Tesla V100-SXM2-16GB": (VOLTA, 640, 1530),
    "Tesla V100-PCIE-32GB": (VOLTA, 640, 1530),
    "NVIDIA A100-PCIE-40GB": (AMPERE_DATACENTER, 432, 1410),
    "NVIDIA A100-PCIE-80GB": (AMPERE_DATACENTER, 432, 1410),
    "NVIDIA A100-SXM4-40GB": (AMPERE_DATACENTER, 432, 1410),
    "NVIDIA A100-SXM4-80GB": (AMPERE_DATACENTER, 432, 1410),
    "NVIDIA RTX A2000": (AMPERE_CONSUMER, 104, 1200),
    "NVIDIA RTX A4000": (AMPERE_CONSUMER, 192, 1560),
    "NVIDIA RTX A4500": (AMPERE_CONSUMER, 224, 1650),
    "NVIDIA RTX A5000": (AMPERE_CONSUMER, 256, 1695),
    "NVIDIA RTX A5500": (AMPERE_CONSUMER, 320, 1770),
    "NVIDIA RTX A6000": (AMPERE_CONSUMER, 336, 1800),
    "NVIDIA GeForce RTX 3090 Ti": (AMPERE_CONSUMER, 336, 1860),
    "NVIDIA GeForce RTX 3090": (AMPERE_CONSUMER, 328, 1695),
    "NVIDIA GeForce RTX 3080 Ti": (AMPERE_CONSUMER, 320, 1665),
    "NVIDIA GeForce RTX 3080": (AMPERE_CONSUMER, 272, 1710),
    "NVIDIA GeForce RTX 3070 Ti": (AMPERE_CONSUMER, 192, 1770),
    "NVIDIA GeForce RTX 3070": (AMPERE_CONSUMER, 184, 1725),
    "NVIDIA GeForce RTX 3060 Ti": (AMPERE_CONSUMER, 152, 1665),
    "NVIDIA GeForce RTX 3060": (AMPERE_CONSUMER, 112, 1777),
    "NVIDIA RTX A2000 ADA": (ADA, 88, 2130),
    "NVIDIA RTX A4000 ADA": (ADA, 192, 2175),
    "NVIDIA RTX A4500 ADA": (ADA, 224, 2580),
    "NVIDIA RTX A5000 ADA": (ADA, 400, 2550),
    "NVIDIA RTX A5880 ADA": (ADA, 440, 2460),
    "NVIDIA RTX A6000 ADA": (ADA, 568, 2505),
    "NVIDIA GeForce RTX 4090": (ADA, 512, 2520),
    "NVIDIA GeForce RTX 4080 SUPER": (ADA, 320, 2550),
    "NVIDIA GeForce RTX 4080": (ADA, 304, 2505),
    "NVIDIA GeForce RTX 4070 Ti SUPER": (ADA, 264, 2610),
    "NVIDIA GeForce RTX 4070 Ti": (ADA, 240, 2610),
    "NVIDIA GeForce RTX 4070 SUPER": (ADA, 224, 2475),
    "NVIDIA GeForce RTX 4070": (ADA, 184, 2475),
    "NVIDIA GeForce RTX 4060 Ti": (ADA, 136, 2535),
    "NVIDIA GeForce RTX 4060": (ADA, 96, 2460),
    "NVIDIA H100 PCIe": (HOPPER, 456, 1620),
    "NVIDIA H100 80GB HBM3": (HOPPER, 528, 1830),
}


class Peak(NamedTuple):
    """Dense figures (without sparsity) from a vendor's data sheet; None = not offered or not published."""

    tf32: float | None
    bf16: float | None
    fp16: float | None
    source: str


DATASHEET: dict[str, Peak] = {}
