"""Whole models on the CPU beside the engines that users could pick instead.

    python -m workshop bench --suite peers --json peers.json --plot peers.png   (extra peers)

GPT-2 and a Llama of 100M with random weights in float32: a prompt at once, and one token of each row over a
filled cache. Every candidate has a process of its own, because what one keeps in memory slows others down,
and all processes take turns, round after round, because the speed of a machine drifts. Before a cell is timed
its answers are compared with eager's. The floor of a token is the time that reading the weights takes at the
bandwidth measured in the same minute.

`models` are measured; `torch_ways` and `engines` are the candidates; `worker` is the process of one,
`bandwidth` the reading, `cells` what is measured, `suite` the run, `table` what it prints.
"""

from workshop.bench.peers.suite import main
from workshop.bench.peers.table import bars

__all__ = ["bars", "main"]
