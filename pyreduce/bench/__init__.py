"""``python -m pyreduce.bench``: the collectives against the MPI's own, measured side by side and checked."""
