"""Say what a file holds: `python -m runner.inspect FILE... [tokenizer=gpt2] [data=GLOB batch=B seq_len=T]`.

Every .bin of llm.c (token shards, evaluation, model, debug state, tokenizer, optimizer state, llama-3
model), our side files and safetensors. With the data that a run trains on, a state file's next batch too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from runner.arguments import home_paths
from runner.command import HELP, keyed, leave, told, whole
from runner.data.shard import inspect_shards
from runner.data.tokenizer import tokenizer as tokenizer_for
from runner.describe import Options, describe
from runner.fault import fault_line

USAGE = "python -m runner.inspect FILE... [tokenizer=byte|gpt2|PATH] [data=GLOB batch=B seq_len=T]"
SHOWN = 3  # files of a folder that a line names


def main(argv: list[str] | None = None) -> int:
    """Describe each file of the command line; return the exit code: 2 if one is missing, 1 if damaged."""
    arguments = home_paths(sys.argv[1:] if argv is None else list(argv))
    files = [a for a in arguments if "=" not in a or Path(a).exists()]
    if not files or HELP & set(arguments):
        print(USAGE)
        return 0 if HELP & set(arguments) else 2
    try:
        options = _options([a for a in arguments if a not in files])
    except ValueError as error:
        return told("runner.inspect", error)
    code = 0
    for path in map(Path, files):
        if (wrong := _no_file(path)) is not None:
            code = told("runner.inspect", ValueError(wrong))
            continue
        try:
            lines = list(describe(path, options))
        except (ValueError, OSError) as error:
            line = fault_line(error) if isinstance(error, OSError) else error
            print(f"runner.inspect: error: {line}", file=sys.stderr)
            code = max(code, 1)
            continue
        print(f"{path}: {lines[0]}, {path.stat().st_size} bytes")
        print("".join(f"  {line}\n" for line in lines[1:]), end="")
    return code


def _no_file(path: Path) -> str | None:
    """Return the line for a name that is no file's; None for a file."""
    if not path.is_dir():
        return None if path.exists() else f"{path}: no such file"
    inside = sorted(p for p in path.iterdir() if p.suffix in (".bin", ".safetensors"))
    hint = f", as in {' '.join(map(str, inside[-SHOWN:]))}" if inside else ""
    return f"{path}: is a folder; name files{hint}"


def _options(arguments: Sequence[str]) -> Options:
    found = keyed(arguments, known=Options._fields, paths=("data",))
    if found.problems:
        raise ValueError("\n".join(found.problems))
    given = {key: texts[-1] for key, texts in found.values.items()}
    numbers = {name: whole(name, given[name], least=1) for name in ("batch", "seq_len") if name in given}
    if "data" in given and len(numbers) < 2:
        raise ValueError("data=: a state does not say how batches are cut; give batch= and seq_len= too")
    if numbers and "data" not in given:
        raise ValueError(f"{next(iter(numbers))}= says how data= is cut; give data=GLOB too, or leave it out")
    if "data" in given and (problems := inspect_shards(given["data"], key="data")[1]):
        raise ValueError("\n".join(problems))
    tokenizer = tokenizer_for(given["tokenizer"]) if "tokenizer" in given else None
    return Options(tokenizer=tokenizer, data=given.get("data"), **numbers)


if __name__ == "__main__":
    leave("runner.inspect", main)
