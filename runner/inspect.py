"""Say what a file holds: `python -m runner.inspect FILE... [tokenizer=gpt2] [data=GLOB batch=B seq_len=T]`.

Every .bin of llm.c (token shards, evaluation, model, debug state, tokenizer, optimizer state, llama-3
model), our side files and safetensors. With the data that a run trains on, a state file's next batch too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from runner.data.tokenizer import tokenizer as tokenizer_for
from runner.describe import Options, describe
from runner.fault import fault_line

USAGE = "python -m runner.inspect FILE... [tokenizer=byte|gpt2|PATH] [data=GLOB batch=B seq_len=T]"


def main(argv: list[str] | None = None) -> int:
    """Describe each file of the command line; return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    paths = [Path(a) for a in arguments if "=" not in a or Path(a).exists()]
    if not paths or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    code = 0
    try:
        options = _options([a for a in arguments if Path(a) not in paths])
    except ValueError as error:
        print(f"runner.inspect: error: {error}", file=sys.stderr)
        return 2
    for path in paths:
        try:
            lines = list(describe(path, options))
        except (ValueError, OSError) as error:
            line = fault_line(error) if isinstance(error, OSError) else error
            print(f"runner.inspect: error: {line}", file=sys.stderr)
            code = 1
            continue
        print(f"{path}: {lines[0]}, {path.stat().st_size} bytes")
        print("".join(f"  {line}\n" for line in lines[1:]), end="")
    return code


def _options(arguments: Sequence[str]) -> Options:
    given = dict(argument.partition("=")[::2] for argument in arguments)
    unknown = given.keys() - set(Options._fields)
    if unknown:
        raise ValueError(f"{min(unknown)}: no such option; {USAGE}")
    for name in ("batch", "seq_len"):
        if name in given and not given[name].isdecimal():
            raise ValueError(f"{name}={given[name]}: expected a whole number")
    if "data" in given and not {"batch", "seq_len"} <= given.keys():
        raise ValueError("data=: a state does not say how batches are cut; give batch= and seq_len= too")
    numbers = {name: int(given[name]) for name in ("batch", "seq_len") if name in given}
    tokenizer = tokenizer_for(given["tokenizer"]) if "tokenizer" in given else None
    return Options(tokenizer=tokenizer, data=given.get("data"), **numbers)


if __name__ == "__main__":
    sys.exit(main())
