"""Sweeps: many runs from one command, each in a process of its own, that survive a crash of any of them.

Map: `plugin` is what Hydra sees (a sweeper and a launcher); `plan` composes and checks every cell;
`cells` knows which cell has which number and result; `execute` runs them through `pool`, whose forked
processes live in `server`; `search` and `branches` decide what runs next; `summary` and `status` tell.
"""
