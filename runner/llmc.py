"""llm.c's command line: `python -m runner.llmc -i train.bin -j val.bin -o out -n 20 -x 50 -y 1`.

Translates the flags of train_gpt2cu into settings, prints the equivalent command, and runs it.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

from runner.data.shard import ShardReader, write_shard
from runner.llmc_flags import parse, usage
from runner.llmc_translate import Batch, translate
from runner.streams import settle_streams


def main(argv: Sequence[str] | None = None) -> int:
    """Translate, print and run; return the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments or arguments[0] in ("--help", "-help"):
        print(usage())
        return 0
    try:
        overrides, notes, batch = translate(parse(arguments))
        if batch is not None:
            write_batch(batch)
    except (ValueError, OSError) as error:
        for line in str(error).splitlines():
            print(f"runner.llmc: error: {line}", file=sys.stderr)
        return 2
    for note in notes:
        print(note)
    print("python -m runner " + " ".join(map(shlex.quote, overrides)), flush=True)
    from runner.cli import run_command

    sys.argv = ["runner", *overrides]  # where Hydra looks
    return run_command(overrides)


def write_batch(batch: Batch) -> None:
    """Write the tokens that -a 1 repeats: a shard of one step, so that every epoch is that step again."""
    reader = ShardReader([batch.source])
    tokens = reader.read(0, start=0, count=batch.tokens)
    reader.close()
    batch.path.parent.mkdir(parents=True, exist_ok=True)
    write_shard(batch.path, tokens)


if __name__ == "__main__":
    settle_streams()
    try:
        code = main()
    except KeyboardInterrupt:
        code = 130
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is written and closed by now, as in `runner.cli`.
    os._exit(code)
