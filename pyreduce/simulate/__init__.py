"""Programs played for all ranks in one process: on arrays or symbols (`run`, `Simulation`), and in time (`predict`).

`interpreter` is the second interpreter of programs: what every rank ends up with. `events` is a model of time: when it
does, on a network that is told in three numbers. ``python -m pyreduce.simulate`` prints and draws the latter. No MPI.
"""

from __future__ import annotations

from pyreduce.simulate.events import Network, Timing, predict
from pyreduce.simulate.interpreter import Simulation, run

__all__ = ["Network", "Simulation", "Timing", "predict", "run"]
