"""Judge from a step's loss and gradient norm whether its update may be applied; nothing waits for a device.

Every rank sees the same two numbers and so reaches the same verdict. State lives in tensors on the
device of those numbers, and no Python branch looks at them: a bad step costs no synchronization.
A non-finite loss or norm is refused by every part but `Off`, and neither of its two values enters a
window. Windows hold float64; W is their length.
"""

from __future__ import annotations

import functools
import math
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from runner import native
from runner.api import State, Verdict
from runner.zscore_device import running_z, two_pass_z
from runner.zscore_host import Window, judge, reason_of, window_of

_NAN, _INF = math.nan, math.inf


class ZScore:
    """Refuse steps whose loss or gradient norm lies far above the last `window` ones (llm.c's -sl, -sg).

    z = (x - mean) / std of the window that includes x, NaN until `window` values came before. A step is
    refused when z > threshold, 0 turning a threshold off; drops are never refused, and the norm is only
    named as the reason where the loss is not. z cannot exceed sqrt(window - 1): see `warnings`.
    By default the arithmetic is llm.c's running sums to the last bit, cancellation included, and refused
    values enter the window. `robust` keeps them out and computes the variance in two passes, so that no
    rounding residue of a spike outlives it. `max_consecutive_skips` is enforced by the loop; None = never.
    """

    def __init__(
        self,
        *,
        max_loss_z: Annotated[float, Ge(0)] = 0.0,
        max_norm_z: Annotated[float, Ge(0)] = 0.0,
        window: Annotated[int, Ge(2), Le(1_000_000)] = 128,
        robust: bool = False,
        max_consecutive_skips: Annotated[int, Ge(1)] | None = 50,
    ) -> None:
        for name, z in (("max_loss_z", max_loss_z), ("max_norm_z", max_norm_z)):
            if not 0 <= z < _INF:
                raise ValueError(f"outlier.{name}={z} must be finite and not negative; 0 turns it off")
        if window < 2:
            raise ValueError(f"outlier.window={window} must be at least 2")
        self.max_loss_z, self.max_norm_z = max_loss_z, max_norm_z
        self.window, self.robust, self.max_consecutive_skips = window, robust, max_consecutive_skips
        # Rows: loss, norm and their squares. Unused places hold 0, which the sums can drop unharmed.
        self._ring = torch.zeros(4, window, dtype=torch.float64)
        self._sums = torch.zeros(4, dtype=torch.float64)
        self._width = torch.tensor([window], dtype=torch.float64)
        self._seen = torch.zeros(1, dtype=torch.int64)
        self._limits = torch.tensor([max_loss_z or _INF, max_norm_z or _INF], dtype=torch.float32)
        self._bits = torch.tensor([1, 2, 4, 8])  # loss finite, norm finite, loss over, norm over
        self._reasons = torch.tensor([reason_of(code) for code in range(16)])

    def __call__(self, loss: Tensor, norm: Tensor) -> Verdict:
        """Judge one step; `loss` and `norm` are the global mean loss [] and gradient norm []."""
        if loss.is_cpu and self._ring.is_cpu and not self.robust:
            return judge(loss, norm, window=self._host_window)
        self._move(loss.device)
        kernels = native.triton_kernels() if loss.is_cuda else None
        if kernels is None or (self.robust and self.window > kernels.WIDTH):
            return self._on_device(loss, norm)
        return self._by_triton(kernels, loss, norm)

    @functools.cached_property
    def _host_window(self) -> Window:
        return window_of(self._ring, self._sums, self._seen, limits=self._limits)

    def _by_triton(self, kernels: Any, loss: Tensor, norm: Tensor) -> Verdict:
        state = {"ring": self._ring, "sums": self._sums, "seen": self._seen, "limits": self._limits}
        verdict: Verdict = kernels.judge_by_z(loss.detach(), norm.detach(), **state, robust=self.robust)
        return verdict

    def _on_device(self, loss: Tensor, norm: Tensor) -> Verdict:
        values = torch.stack((loss.detach(), norm.detach())).double()
        finite = values.isfinite()
        entry = torch.cat((values, values * values))
        slot = self._seen.remainder(self.window)
        old = self._ring.index_select(1, slot).squeeze(1)
        sums = self._sums - old + entry
        if self.robust:
            window = self._ring[:2].index_copy(1, slot, values.unsqueeze(1))
            z = two_pass_z(values, window, width=self._width)
        else:
            z = running_z(values, sums, width=self._width)
        z.masked_fill_(self._seen < self.window, _NAN)
        narrow = z.float()  # llm.c compares float32; an infinite z does not count
        over = (narrow > self._limits).logical_and_(narrow < _INF)
        reason = self._reasons.take(torch.cat((finite, over)).mul(self._bits).sum())
        apply = reason == 0

        enters = apply if self.robust else finite.all()
        self._ring.index_copy_(1, slot, torch.where(enters, entry, old).unsqueeze(1))
        self._sums.copy_(torch.where(enters, sums, self._sums))
        self._seen.add_(enters)
        loss_z, norm_z = z.unbind()
        return Verdict(apply, loss_z, norm_z, reason)

    def warnings(self) -> list[str]:
        """Return a line for each threshold that can never fire."""
        limit = math.sqrt(self.window - 1)
        return [
            f"outlier.{name}={z:g} can never fire: with window={self.window} no z-score exceeds "
            f"{limit:.2f}; lower it or widen the window"
            for name, z in (("max_loss_z", self.max_loss_z), ("max_norm_z", self.max_norm_z))
            if z >= limit
        ]

    def state_dict(self) -> State:
        return {"ring": self._ring.clone(), "sums": self._sums.clone(), "seen": self._seen.clone()}

    def load_state_dict(self, state: State) -> None:
        _check_window(state, shape=self._ring.shape, kind="zscore")
        self._ring.copy_(state["ring"])
        self._sums.copy_(state["sums"])
        self._seen.copy_(state["seen"])

    def _move(self, device: torch.device) -> None:
        if self._ring.device == device:
            return
        for name in ("_ring", "_sums", "_width", "_seen", "_limits", "_bits", "_reasons"):
            setattr(self, name, getattr(self, name).to(device))
        self.__dict__.pop("_host_window", None)  # it is a view of the memory that was left


class Median:
    """Refuse steps whose gradient norm exceeds `max_ratio` times the median of the norms before it.

    The median (the lower of two) is over the last `window` finite norms and counts once `warmup` of them
    are there. Refused norms enter it too: the median shrugs them off, and follows a lasting change.
    """

    def __init__(
        self,
        *,
        max_ratio: Annotated[float, Gt(1)] = 5.0,
        window: Annotated[int, Ge(2), Le(1_000_000)] = 128,
        warmup: Annotated[int, Ge(1)] = 16,
        max_consecutive_skips: Annotated[int, Ge(1)] | None = 50,
    ) -> None:
        if not 1 < max_ratio < _INF:
            raise ValueError(f"outlier.max_ratio={max_ratio} must be finite and above 1 (the median itself)")
        if not 1 <= warmup <= window:
            raise ValueError(f"outlier.warmup={warmup} must lie in 1..{window} (outlier.window)")
        self.max_ratio, self.window, self.warmup = max_ratio, window, warmup
        self.max_consecutive_skips = max_consecutive_skips
        self._ring = torch.full((window,), _INF, dtype=torch.float64)  # unused places sort to the end
        self._seen = torch.zeros(1, dtype=torch.int64)

    def __call__(self, loss: Tensor, norm: Tensor) -> Verdict:
        """Judge one step; only the norm is compared, both must be finite."""
        if self._ring.device != norm.device:
            self._ring, self._seen = self._ring.to(norm.device), self._seen.to(norm.device)
        refused = _non_finite(loss, norm)
        value = norm.detach().double()
        middle = (self._seen.clamp(1, self.window) - 1).div(2, rounding_mode="floor")
        median = self._ring.sort().values.take(middle)
        over = (value > median * self.max_ratio).logical_and_(self._seen >= self.warmup).squeeze(0)
        fine = refused == 0
        reason = refused + 16 * over.logical_and_(fine)

        slot = self._seen.remainder(self.window)
        self._ring.index_copy_(0, slot, torch.where(fine, value, self._ring.take(slot)))
        self._seen.add_(fine)
        nan = torch.full_like(value, _NAN)
        return Verdict(reason == 0, nan, nan, reason)

    def warnings(self) -> list[str]:
        return []

    def state_dict(self) -> State:
        return {"norms": self._ring.clone(), "seen": self._seen.clone()}

    def load_state_dict(self, state: State) -> None:
        _check_window(state, shape=self._ring.shape, kind="median")
        self._ring.copy_(state["norms"])
        self._seen.copy_(state["seen"])


class Finite:
    """Refuse only steps whose loss or gradient norm is not a finite number; keeps no state."""

    def __init__(self, *, max_consecutive_skips: Annotated[int, Ge(1)] | None = 50) -> None:
        self.max_consecutive_skips = max_consecutive_skips

    def __call__(self, loss: Tensor, norm: Tensor) -> Verdict:
        if loss.is_cuda and (kernels := native.triton_kernels()) is not None:
            verdict: Verdict = kernels.judge_finite(loss.detach(), norm.detach())
            return verdict
        reason = _non_finite(loss, norm)
        nan = torch.full_like(reason, _NAN, dtype=torch.float64)
        return Verdict(reason == 0, nan, nan, reason)

    def warnings(self) -> list[str]:
        return []

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None:
        pass


class Off:
    """Apply every update, also one with a NaN in it, which ends the model: what llm.c does."""

    max_consecutive_skips: int | None = None

    def __call__(self, loss: Tensor, norm: Tensor) -> Verdict:
        reason = torch.zeros_like(norm, dtype=torch.int64)
        nan = torch.full_like(norm, _NAN, dtype=torch.float64)
        return Verdict(reason == 0, nan, nan, reason)

    def warnings(self) -> list[str]:
        return ["outlier=off: an update with a NaN or infinite gradient is applied and ends the model"]

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None:
        pass


def _non_finite(loss: Tensor, norm: Tensor) -> Tensor:
    bad_loss = loss.detach().isfinite().logical_not_()
    bad_norm = norm.detach().isfinite().logical_not_()
    return bad_loss + 2 * bad_norm  # int64, the first two bits of REASONS


def _check_window(state: State, *, shape: torch.Size, kind: str) -> None:
    """Refuse a state of another kind or window length with one line."""
    saved = state.get("ring" if kind == "zscore" else "norms")
    if saved is None:
        raise ValueError(f"outlier: the checkpoint holds no state of outlier={kind}, only {sorted(state)}")
    if saved.shape != shape:
        raise ValueError(
            f"outlier.window={shape[-1]} differs from the checkpoint's {saved.shape[-1]}: "
            f"set outlier.window={saved.shape[-1]}"
        )
