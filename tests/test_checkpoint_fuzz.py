"""A short run of the file fuzzer; `python tests/fuzz_files.py` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz_files import fuzz, subjects


def test_mutated_files_load_or_are_refused(tmp_path: Path) -> None:
    outcome = fuzz(1100, 1, tmp_path)
    kinds = subjects().keys()
    assert all(outcome[f"{kind} refused"] > 20 for kind in kinds), outcome
    assert outcome["side loaded"] <= 1, outcome


@pytest.mark.slow
def test_ten_thousand_mutations(tmp_path: Path) -> None:
    assert sum(fuzz(10_000, 0, tmp_path).values()) == 10_000
