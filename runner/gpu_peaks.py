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
    """Dense figures of a vendor's document, half of those it prints with sparsity; None = not offered.

    GeForce figures are with fp32 accumulation, as a training run needs it.
    """

    tf32: float | None
    bf16: float | None
    fp16: float
    source: str


_H200 = "NVIDIA H200 datasheet: TF32 989, BF16 1979 with sparsity"
_H100 = "NVIDIA H100 datasheet, H100 NVL column: TF32 835, BF16 1671 with sparsity"
_GH200 = "NVIDIA GH200 Grace Hopper datasheet: TF32 989, BF16 1979 with sparsity"
_BLACKWELL = "NVIDIA Blackwell architecture technical brief, dense column"
_L40S = "NVIDIA L40S datasheet: TF32 183, BF16 362.05 dense"
_L40 = "NVIDIA L40 datasheet: TF32 90.5, BF16 181.05 dense"
_L4 = "NVIDIA L4 datasheet: TF32 120, BF16 242 with sparsity"
_A10 = "NVIDIA A10 datasheet: TF32 62.5, BF16 125 dense"
_A40 = "NVIDIA A40 datasheet: TF32 74.8, BF16 149.7 dense"
_T4 = "NVIDIA T4 datasheet: mixed precision (FP16/FP32) 65"
_RTX50 = "NVIDIA RTX Blackwell GPU architecture whitepaper, appendix, dense with FP32 accumulate"

DATASHEET: dict[str, Peak] = {
    "NVIDIA H200": Peak(494.5, 989.5, 989.5, _H200),
    "NVIDIA H100 NVL": Peak(417.5, 835.5, 835.5, _H100),
    "NVIDIA GH200 480GB": Peak(494.5, 989.5, 989.5, _GH200),
    "NVIDIA B200": Peak(1100.0, 2250.0, 2250.0, _BLACKWELL),
    "NVIDIA GB200": Peak(1250.0, 2500.0, 2500.0, _BLACKWELL),
    "NVIDIA L40S": Peak(183.0, 362.05, 362.05, _L40S),
    "NVIDIA L40": Peak(90.5, 181.05, 181.05, _L40),
    "NVIDIA L4": Peak(60.0, 121.0, 121.0, _L4),
    "NVIDIA A10": Peak(62.5, 125.0, 125.0, _A10),
    "NVIDIA A40": Peak(74.8, 149.7, 149.7, _A40),
    "Tesla T4": Peak(None, None, 65.0, _T4),
    "NVIDIA GeForce RTX 5090": Peak(104.8, 209.5, 209.5, _RTX50),
    "NVIDIA GeForce RTX 5080": Peak(56.3, 112.6, 112.6, _RTX50),
    "NVIDIA GeForce RTX 5070 Ti": Peak(43.9, 87.9, 87.9, _RTX50),
    "NVIDIA GeForce RTX 5070": Peak(30.9, 61.7, 61.7, _RTX50),
}
