"""Token ids of bytes, GPT-2 and local files; decoding that never fails; llm.c's tokenizer file."""

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.data.tokenizer import EOT_TEXT, ByteTokenizer, gpt2, tokenizer
from runner.data.tokenizer_file import read_tokenizer, write_tokenizer
from runner.data.tokenizer_import import read_hugging_face, read_tiktoken

TINY = Path(__file__).parent / "golden" / "tiny_tokenizer.bin"
STRESS = [
    "",
    "I'll say it's 12345 times\r\n\n\t  x+=1;  \n",
    "a" * 3000,
    "漢字かな 🙂🏽\u200b naïve é",
    EOT_TEXT,
    f"two{EOT_TEXT}{EOT_TEXT} documents",
]
GPT2 = gpt2()


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("hello world", [31373, 995]),
        ("Hello, world!", [15496, 11, 995, 0]),
        (EOT_TEXT, [27, 91, 437, 1659, 5239, 91, 29]),  # text stays text
    ],
)
def test_gpt2_ids(text, ids):
    assert GPT2.encode(text) == ids
    assert (GPT2.vocab_size, GPT2.eot) == (50257, 50256)


@pytest.mark.parametrize("name", ["byte", "gpt2"])
@pytest.mark.parametrize("text", STRESS)
def test_round_trip_and_arrays(name, text):
    t = tokenizer(name)
    ids = t.encode(text)
    assert t.decode(ids) == text
    assert t.encode_array(text).tolist() == ids
    assert t.eot not in ids


@given(st.lists(st.integers(-5, 60000), max_size=30))
def test_decode_never_fails(ids):
    for t in (GPT2, ByteTokenizer()):
        assert isinstance(t.decode(ids), str)


def test_decode_marks_what_is_no_text():
    assert ByteTokenizer().decode([104, 105, 0xE2, 300, -1]) == "hi���"
    assert ByteTokenizer().decode([256, 65]) == EOT_TEXT + "A"
    assert GPT2.decode([50256, 50257]) == EOT_TEXT + "�"


def test_lone_surrogates_are_replaced():
    for t in (GPT2, ByteTokenizer()):
        assert t.decode(t.encode_array("a\ud83d b").tolist()) == "a� b"


def test_unknown_name_lists_what_is_allowed():
    with pytest.raises(ValueError, match=r"byte, gpt2, .*tokenizer\.json.*tiktoken"):
        tokenizer("gpt-2")


def test_byte_file_is_llmc_golden(tmp_path):
    write_tokenizer(tmp_path / "t.bin", ByteTokenizer())
    assert (tmp_path / "t.bin").read_bytes() == TINY.read_bytes()


def test_gpt2_file_round_trip(tmp_path):
    write_tokenizer(tmp_path / "t.bin", GPT2)
    found = read_tokenizer(tmp_path / "t.bin")
    assert (len(found.tokens), found.eot) == (50257, 50256)
    assert found.tokens == tuple(GPT2.token_bytes(token) for token in range(50257))
    assert found.decode([15496, 11, 995, 0, 60000]) == "Hello, world!�"


@pytest.mark.parametrize("cut", [10, 1024, 1200, 1549])
def test_damaged_file_is_refused(tmp_path, cut):
    path = tmp_path / "t.bin"
    path.write_bytes(TINY.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"t\.bin"):
        read_tokenizer(path)
    path.write_bytes(TINY.read_bytes() + b"x")
    with pytest.raises(ValueError, match="damaged"):
        read_tokenizer(path)


def tiktoken_file(path):
    lines = [f"{base64.b64encode(GPT2.token_bytes(rank)).decode()} {rank}" for rank in range(50256)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_tiktoken_file(tmp_path):
    path = tiktoken_file(tmp_path / "r50k_base.tiktoken")
    for t in (read_tiktoken(path), tokenizer(f"{path}:gpt2"), tokenizer(str(path))):
        assert [t.encode(text) for text in STRESS] == [GPT2.encode(text) for text in STRESS]
        assert (t.vocab_size, t.eot) == (50257, 50256)
        assert t.fingerprint() == GPT2.fingerprint()
    other = tokenizer(f"{path}:cl100k_base")  # other words and special tokens: other fingerprint
    assert other.fingerprint() != GPT2.fingerprint()


def test_bad_tiktoken_files(tmp_path):
    with pytest.raises(ValueError, match="after a colon"):
        tokenizer(str(tiktoken_file(tmp_path / "mine.tiktoken")))
    bad = tmp_path / "gpt2.tiktoken"
    bad.write_text("IQ== 0\nnot base64\n")
    with pytest.raises(ValueError, match="line 2"):
        tokenizer(str(bad))
    bad.write_text("IQ== 0\n")
    with pytest.raises(ValueError, match="not a complete set"):
        tokenizer(str(bad))
    with pytest.raises(ValueError, match="cannot be read"):
        tokenizer(str(tmp_path / "none" / "gpt2.tiktoken"))


def hugging_face_spec(*, pre_tokenizer=None):
    from runner.data.tokenizer import byte_alphabet

    alphabet = list(byte_alphabet())
    pairs = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("l", "l"), ("Ġ", "Ġ"), ("1", "2")]
    vocab = {c: i + 1 for i, c in enumerate(alphabet)} | {"".join(p): 257 + i for i, p in enumerate(pairs)}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": 0, "content": EOT_TEXT, "special": True, "single_word": False, "lstrip": False}
            | {"rstrip": False, "normalized": False}
        ],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer
        or {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab | {EOT_TEXT: 0}, "merges": [list(p) for p in pairs]},
    }


def write_spec(tmp_path, spec):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(spec))
    return path


SPLIT = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": r"\p{L}+|\P{L}"}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ],
}


@pytest.mark.parametrize("pre_tokenizer", [None, SPLIT])
def test_hugging_face_file_through_tiktoken_equals_its_own_library(tmp_path, pre_tokenizer):
    library = pytest.importorskip("tokenizers")
    path = write_spec(tmp_path, hugging_face_spec(pre_tokenizer=pre_tokenizer))
    ours = tokenizer(str(path))
    assert type(ours).__name__ == "BpeTokenizer"
    assert (ours.eot, ours.vocab_size) == (0, 263)
    theirs = library.Tokenizer.from_file(str(path))
    theirs.encode_special_tokens = True
    for text in [*STRESS, "the other all  12   the"]:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids
        assert ours.decode(ours.encode(text)) == text


def digits_spec():
    digits = {"type": "Digits", "individual_digits": True}
    byte_level = hugging_face_spec()["pre_tokenizer"]
    return hugging_face_spec(pre_tokenizer={"type": "Sequence", "pretokenizers": [digits, byte_level]})


def test_other_hugging_face_kinds_use_the_library(tmp_path):
    pytest.importorskip("tokenizers")
    t = read_hugging_face(write_spec(tmp_path, digits_spec()))
    assert type(t).__name__ == "HuggingFaceTokenizer"
    for text in STRESS:
        assert t.decode(t.encode(text)) == text
        assert t.eot not in t.encode(text)
    assert t.decode([0, 99999]) == EOT_TEXT + "�"
    assert t.encode_array("12").tolist() == t.encode("12")


def test_library_missing_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match="pip install tokenizers"):
        read_hugging_face(write_spec(tmp_path, digits_spec()))


def test_merges_out_of_order_are_not_given_to_tiktoken(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    spec = hugging_face_spec()
    spec["model"]["merges"].reverse()
    with pytest.raises(ValueError, match="pip install"):
        read_hugging_face(write_spec(tmp_path, spec))


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"model": {"vocab": {}, "merges": []}}', '{"model": 3}']
)
def test_bad_json_is_one_line(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer=.*tokenizer\.json") as caught:
        tokenizer(str(path))
    assert "\n" not in str(caught.value)


def test_importing_the_data_package_needs_no_torch():
    modules = "corpus synthetic prepare tokenizer stream window loader shard"
    code = "import sys\n" + "".join(f"import runner.data.{name}\n" for name in modules.split())
    code += "assert 'torch' not in sys.modules and 'tiktoken' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
