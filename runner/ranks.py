"""Who this process is among the ranks of a run, and how the ranks meet.

Ranks are started by `python -m runner` itself (`runner.supervise`), by torchrun or by srun. In each
case one of them, rank 0, reads the command line; the others are told what to do through the store.
torch is imported only once there is somebody to meet.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from runner.stop import undisturbed

if TYPE_CHECKING:
    import torch

_MEET_S = 300  # to wait for rank 0's store: interpreters may start slowly from a network disk
_NEWS_S = 86_400  # to wait for what rank 0 reads and checks, which may tokenize a corpus first
COLLECTIVE_S = 3600  # longer than any save or evaluation that a rank waits for
_FIRST_PORT, _PORTS = 15_000, 16_000  # of srun's ranks, by job number, below the ephemeral range


class Place(NamedTuple):
    """One rank of several, and where rank 0 is found."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    address: str = "127.0.0.1"
    port: int = 0
    hosted: bool = False  # whether the launcher hosts the store itself, as torchrun's agent does
    key: str = "runner"  # keeps the attempts of an elastic launcher apart


ALONE = Place()


def placed(env: Mapping[str, str] = os.environ) -> Place | None:
    """Return this process's place among the ranks that torchrun or srun started; None if there is one rank.

    Raises:
        ValueError: the variables contradict themselves.
    """
    place = _by_torchrun(env) if "RANK" in env and "WORLD_SIZE" in env else _by_srun(env)
    return place if place is not None and place.world > 1 else None


def _by_torchrun(env: Mapping[str, str]) -> Place:
    rank, world = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
    if not 0 <= rank < world:
        raise ValueError(f"RANK: {rank} is not one of WORLD_SIZE={world} ranks; start with torchrun or srun")
    if world > 1 and "MASTER_PORT" not in env:
        raise ValueError("MASTER_PORT: not set, though RANK and WORLD_SIZE are; start with torchrun or srun")
    attempt = f"{env.get('TORCHELASTIC_RUN_ID', '')}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return Place(
        rank=rank,
        world=world,
        local_rank=_integer(env, "LOCAL_RANK", default=rank),
        address=env.get("MASTER_ADDR", "127.0.0.1"),
        port=_integer(env, "MASTER_PORT", default=0),
        hosted=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        key=f"runner/{attempt}",
    )


def _by_srun(env: Mapping[str, str]) -> Place | None:
    """Read srun's variables; a batch script has some of them too, but no step."""
    if "SLURM_PROCID" not in env or "SLURM_STEP_ID" not in env:
        return None
    count = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    job, step = _integer(env, "SLURM_JOB_ID", default=0), _integer(env, "SLURM_STEP_ID")
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    return Place(
        rank=_integer(env, "SLURM_PROCID"),
        world=_integer(env, count, default=1),
        local_rank=_integer(env, "SLURM_LOCALID", default=0),
        address=env.get("MASTER_ADDR") or first_node(nodes),
        port=_integer(env, "MASTER_PORT", default=_FIRST_PORT + (job * 16 + step) % _PORTS),
        key=f"runner/{job}.{step}.{env.get('SLURM_RESTART_COUNT', '0')}",
    )


def first_node(nodes: str) -> str:
    """Return the first host of a SLURM node list such as `node[003-006,9],login1`."""
    match = re.match(r"([^,\[]+)(?:\[([0-9]+)[^\]]*\])?([^,]*)", nodes)
    assert match is not None
    return match[1] + (match[2] or "") + match[3]


def _integer(env: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    if name not in env and default is not None:
        return default
    try:
        return int(env[name])
    except (KeyError, ValueError):
        found = env.get(name, "(not set)")
        raise ValueError(
            f"{name}: {found!r} is not an integer; start the ranks with torchrun or srun"
        ) from None


def meet(place: Place, *, listening: int | None = None) -> Any:
    """Return the store that all ranks share; rank 0 hosts it unless the launcher does.

    `listening` is a bound socket's file descriptor, which no other program can take away.

    Raises:
        ValueError: rank 0 cannot be reached, or its port is taken.
    """
    with undisturbed():
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    hosts = place.rank == 0 and not place.hosted
    try:
        store = TCPStore(
            place.address,
            place.port,
            place.world,
            is_master=hosts,
            timeout=timedelta(seconds=_MEET_S),
            wait_for_workers=False,
            master_listen_fd=listening,
        )
    except (RuntimeError, ValueError) as error:
        where, why = f"{place.address}:{place.port}", str(error).splitlines()[0]
        out = "set MASTER_PORT to a free one" if hosts else "check that rank 0 runs, and MASTER_ADDR"
        raise ValueError(
            f"rank {place.rank}: cannot meet the other ranks at {where} ({why}); {out}"
        ) from error
    return PrefixStore(place.key, store)


class News(NamedTuple):
    """What rank 0 tells the others: run this configuration in `dir`, or leave with `code`."""

    config: dict[str, Any] | None = None
    dir: str = ""
    code: int = 0


def tell(store: Any, news: News) -> None:
    """Let the other ranks go on."""
    store.set("news", pickle.dumps(tuple(news)))


def hear(store: Any) -> News:
    """Wait for what rank 0 tells.

    Raises:
        ValueError: it left without a word.
    """
    try:
        store.wait(["news"], timedelta(seconds=_NEWS_S))
        news = News(*pickle.loads(store.get("news")))
        store.add("heard", 1)
    except RuntimeError as error:
        raise ValueError("rank 0 ended before it told the other ranks what to run; see its output") from error
    return news


class Leader:
    """Rank 0 of ranks that somebody else started: it owes the others one word, whatever happens to it."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._store: Any = None
        self._told = False

    def announce(self, config: dict[str, Any], *, dir: str) -> Any:
        """Tell the others to run `config` in `dir`; return the store."""
        self._say(News(config, dir))
        return self._store

    def dismiss(self, code: int) -> None:
        """Tell the others to leave, if they were told nothing yet."""
        if not self._told:
            self._say(News(code=code))

    def _say(self, news: News) -> None:
        self._store = meet(self.place)
        self._told = True
        tell(self._store, news)
        if news.config is None and not self.place.hosted:
            self._wait_until_heard()

    def _wait_until_heard(self) -> None:
        """Keep the store up until the others have read from it: it ends with this process."""
        import time

        deadline = time.monotonic() + _MEET_S
        while self._store.add("heard", 0) < self.place.world - 1 and time.monotonic() < deadline:
            time.sleep(0.02)


def join(place: Place, store: Any, *, device: torch.device) -> None:
    """Make the default process group; call it once the process is settled and its device chosen."""
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("group", store),
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=COLLECTIVE_S),
        device_id=device if device.type == "cuda" else None,
    )


def first_to(store: Any, what: str) -> bool:
    """Whether this rank is the first to do `what`; true if nobody can be asked any more."""
    try:
        return bool(store.add(what, 1) == 1)
    except RuntimeError:
        return True
