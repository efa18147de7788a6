"""Measure the runner side by side with bare loops and peers: `python -m benchmarks` (or `make bench`).

Only ratios taken in one run are results. Contenders are whole processes that take turns (`race`), so
that a machine that slows down slows all of them. `cpu` figures are CPU time on one thread, which other
processes hardly disturb; `wall` figures on two threads need a quiet machine, and each result records
the load average that it was taken under.
"""
