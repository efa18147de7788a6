"""tmp"""

from typing import Literal

import torch


class Precision:
    def __init__(self, *, mode: Literal["auto", "fp32", "bf16"] = "auto"):
        self.mode = "bf16" if mode == "auto" else mode
        self.param_dtype = torch.float32

    def apply(self, device):
        pass

    def autocast(self, device):
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.mode != "fp32")
