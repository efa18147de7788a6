"""Bring each parameter's gradient into the flat fp32 buffer at the least memory traffic.

A large fp32 parameter starts a step without a `.grad`: autograd hands over the first one that it makes,
which is copied, and later ones are added in place. That saves clearing the buffer and reading it back,
8 bytes per element and step. Until then the buffer is offered as the parameter's `main_grad`, for a backward
pass that can write there and hand that over. Under bfloat16 weights every gradient is copied or added by the
hook.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from runner.parallel.layout import Layout, Placed

LARGE = 1 << 16  # elements from which a copy by a Python hook is cheaper than clearing and adding


class Gradients:
    """The flat gradient [numel] of a layout and how far each parameter's part is valid."""

    def __init__(self, layout: Layout, *, flat: Tensor) -> None:
        self._large: list[tuple[Placed, Tensor]] = []
        small: list[Placed] = []
        self._stale: set[int] = set()
        self._handles: list[Any] = []
        for placed in layout.placed:
            main = flat[placed.offset : placed.offset + placed.numel]
            shaped = main.view(placed.parameter.shape)
            if placed.parameter.dtype == flat.dtype and placed.numel < LARGE:
                placed.parameter.grad = shaped
                small.append(placed)
            else:
                self._hook(placed, shaped)
                self._large.append((placed, shaped))
        self._small = _covering(small, flat=flat)

    def clear(self) -> None:
        """Start a sum of gradients; what the buffer holds is valid again after `settle`."""
        for small in self._small:
            small.zero_()
        for placed, main in self._large:
            placed.parameter.grad = None
            _offer(placed, main if placed.parameter.dtype == main.dtype else None)
        self._stale = set(range(len(self._large)))

    def settle(self) -> None:
        """Give a zero gradient to every parameter that backward did not reach."""
        for index in self._stale:
            placed, main = self._large[index]
            _offer(placed, None)
            main.zero_()
            if placed.parameter.dtype == main.dtype:
                placed.parameter.grad = main
        self._stale = set()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, placed: Placed, main: Tensor) -> None:
        index = len(self._large)
        in_place = placed.parameter.dtype == main.dtype

        def collect(parameter: Tensor) -> None:
            grad = parameter.grad
            assert grad is not None
            if index in self._stale:
                if grad.data_ptr() != main.data_ptr():
                    main.copy_(grad)
                _offer(placed, None)
                self._stale.discard(index)
            elif not in_place:
                main.add_(grad)
            parameter.grad = main if in_place else None

        handle = placed.parameter.register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]
        self._handles.append(handle)


def _offer(placed: Placed, main: Tensor | None) -> None:
    placed.parameter.main_grad = main  # type: ignore[attr-defined]


def _covering(small: list[Placed], *, flat: Tensor) -> list[Tensor]:
    """Return as few views of `flat` as hold exactly these parameters, so that clearing takes few calls."""
    spans: list[list[int]] = []
    for placed in sorted(small, key=lambda placed: placed.offset):
        if spans and spans[-1][1] == placed.offset:
            spans[-1][1] += placed.numel
        else:
            spans.append([placed.offset, placed.offset + placed.numel])
    return [flat[start:end] for start, end in spans]
