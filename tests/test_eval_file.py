"""llm.c's evaluation files: its own loader's batches, the rules of the format, and JSON lines."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.data.eval_file import (
    Example,
    Question,
    read_examples,
    read_questions,
    write_examples,
)
from runner.data.word_order import word_order_questions
from runner.plugins.evaluate.multiple_choice import rows, share

GOLDEN = Path(__file__).parent / "golden"
EVALLOADER = json.loads((GOLDEN / "evalloader.json").read_text())
FILES = {name: GOLDEN / "tiny" / f"{name}.bin" for name in ("tiny_eval10", "tiny_eval5")}


def expected(key: str) -> list[Example]:
    return [Example(tuple(e["ctx"]), tuple(map(tuple, e["ends"])), e["label"]) for e in EVALLOADER[key]]


@pytest.mark.parametrize(("name", "key"), [("tiny_eval10", "data10"), ("tiny_eval5", "data5")])
def test_reads_and_rewrites_llmc_files(name, key, tmp_path):
    path = FILES[name]
    examples = read_examples(path, seq_len=32)
    assert examples == expected(key)
    write_examples(tmp_path / "again.bin", examples)
    assert (tmp_path / "again.bin").read_bytes() == path.read_bytes()


def runs():
    return [
        pytest.param(run, id=f"{run['file']}-B{run['B']}-{run['rank']}of{run['num_processes']}")
        for run in EVALLOADER["runs"]
        if "batches" in run
    ]


@pytest.mark.parametrize("run", runs())
def test_batches_equal_llmc_evalloader(run):
    examples = read_examples(GOLDEN / "tiny" / run["file"], seq_len=run["T"])
    mine = share(len(examples), rank=run["rank"], world=run["num_processes"])
    assert (len(examples), mine.start, mine.stop) == (run["num_examples"], run["start"], run["end"])
    per_batch, longest_share = run["B"] // 4, len(share(len(examples), rank=0, world=run["num_processes"]))
    assert -(-longest_share // per_batch) == run["num_batches"] == len(run["batches"])
    for i, batch in enumerate(run["batches"]):
        part = mine[i * per_batch : (i + 1) * per_batch]
        assert (part.start, len(part)) == (batch["first_example"], batch["examples"])
        laid_out = rows([examples[k] for k in part], seq_len=run["T"])
        assert [examples[k].label for k in part] == batch["labels"][: len(part)]
        ones = [[int(p), int(laid_out.targets.reshape(-1)[p])] for p in np.flatnonzero(laid_out.mask.numpy())]
        assert ones == batch["mask_ones"]
        used = run["T"] - np.argmax(laid_out.mask.numpy()[:, ::-1], axis=1)  # up to the last target
        want = np.array(batch["inputs"]).reshape(-1, run["T"])
        for row, length in enumerate(used):
            assert laid_out.inputs[row, :length].tolist() == want[row, :length].tolist()


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(1, 9))
def test_shares_cover_every_example_once_and_no_rank_fails(count, world):
    shares = [share(count, rank=rank, world=world) for rank in range(world)]
    assert [i for part in shares for i in part] == list(range(count))
    assert all(len(part) <= len(shares[0]) for part in shares)


ids = st.lists(st.integers(0, 65534), min_size=1, max_size=6).map(tuple)
some_examples = st.lists(
    st.builds(Example, ids, st.tuples(ids, ids, ids, ids), st.integers(0, 3)), min_size=1, max_size=5
)


@settings(deadline=None, max_examples=40)
@given(some_examples)
def test_any_examples_survive_the_file(tmp_path_factory, examples):
    path = tmp_path_factory.mktemp("eval") / "x.bin"
    write_examples(path, examples)
    assert read_examples(path) == examples


@given(st.builds(Example, ids, st.tuples(ids, ids, ids, ids), st.integers(0, 3)), st.integers(2, 12))
def test_cropping_keeps_the_endings_and_one_context_for_all(example, seq_len):
    laid_out = rows([example], seq_len=seq_len)
    first = [int(np.argmax(mask.numpy())) for mask in laid_out.mask]
    assert len(set(first)) == 1
    for row, ending in enumerate(example.endings):
        assert tuple(laid_out.targets[row][laid_out.mask[row]].tolist()) == ending[: seq_len - 1]


def damaged(tmp_path: Path, at: int, word: int) -> Path:
    raw = np.frombuffer(FILES["tiny_eval10"].read_bytes(), "<u2").copy()
    raw[512 + at] = word
    path = tmp_path / "damaged.bin"
    path.write_bytes(raw.tobytes())
    return path


@pytest.mark.parametrize(
    ("at", "word", "message"),
    [
        (0, 7, "starts with 7, not 65535"),
        (1, 61, "61 bytes"),
        (1, 60000, "60000 bytes, the longest"),
        (2, 5, "its index is 5"),
        (3, 4, "label 4 of 4"),
        (4, 5, "label 2 of 5 completions"),
        (5, 0, "a part of 0 tokens"),
        (5, 500, "a part of 500 tokens"),
    ],
)
def test_each_rule_of_the_format_has_its_line(tmp_path, at, word, message):
    with pytest.raises(ValueError, match=message) as raised:
        read_examples(damaged(tmp_path, at, word))
    assert "example 0 of 10" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_llmc_limits_hold_with_a_sequence_length():
    with pytest.raises(ValueError, match="takes less than"):
        read_examples(FILES["tiny_eval10"], seq_len=12)
    with pytest.raises(ValueError, match="longest example"):
        read_examples(FILES["tiny_eval10"], seq_len=4)


def test_truncation_trailing_bytes_and_other_files_are_refused(tmp_path):
    raw = FILES["tiny_eval5"].read_bytes()
    for change in (raw[:-2], raw + b"\0\0", raw[:1023], raw[:1025], b""):
        (tmp_path / "x.bin").write_bytes(change)
        with pytest.raises(ValueError, match=r"x\.bin"):
            read_examples(tmp_path / "x.bin")
    with pytest.raises(ValueError, match="magic 20240520"):
        read_examples(GOLDEN / "tiny" / "nano_val.bin")
    with pytest.raises(ValueError, match="No such file"):
        read_examples(tmp_path / "none.bin")


def test_reads_hellaswag_lines(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"ctx": "A man", "endings": ["sat.", "sun.", "ran.", "ate."], "label": 2, "ind": 4}\n\n')
    assert read_questions(path) == [Question("A man", ("sat.", "sun.", "ran.", "ate."), 2)]
    # inside a text stand separators that other readers cut lines at
    path.write_text(
        '\ufeff{"ctx": "a\u2028b\x85", "endings": ["c", "d"], "label": 0}\r\n', encoding="utf-8", newline=""
    )
    assert read_questions(path) == [Question("a\u2028b\x85", ("c", "d"), 0)]
    for bad in (
        "{",
        "[]",
        '{"ctx": "a"}',
        '{"ctx": "a", "endings": ["b", "c"], "label": 2}',
        '{"ctx": "", "endings": ["b", "c"], "label": 0}',
    ):
        path.write_text(bad)
        with pytest.raises(ValueError, match=r"x\.jsonl:1"):
            read_questions(path)
    path.write_text("\n \n")
    with pytest.raises(ValueError, match="holds no question"):
        read_questions(path)


def test_word_order_questions_are_permutations_and_always_the_same():
    questions = word_order_questions(200)
    assert questions == word_order_questions(200)
    assert questions != word_order_questions(200, seed=1)
    for question in questions:
        assert len(set(question.endings)) == 4
        assert len({tuple(sorted(ending.split(" "))) for ending in question.endings}) == 1
        assert all(34 <= len(ending) <= 48 for ending in question.endings)
    assert {question.label for question in questions[:40]} == {0, 1, 2, 3}
    with pytest.raises(ValueError, match="items=5000"):
        word_order_questions(5000)


def test_word_order_questions_come_from_held_out_chapters_only():
    from runner.data.corpus import moby_documents

    held_out = " ".join(" ".join(d.text.split()) for d in moby_documents() if d.split == "val")
    for question in word_order_questions(50):
        assert f"{question.context} {question.endings[question.label]}" in held_out
