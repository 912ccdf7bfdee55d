"""Data-parallel training on handwritten digits: each rank learns from its share of the images.

    mpirun -n 4 python examples/train_digits.py

The network (64 pixels, one hidden layer, 10 digits) is NumPy only. All weights lie in one flat vector, and one step of
training on P ranks is

    1. each rank computes the gradient of all weights, summed over its shard of the batch
    2. reduce_scatter   adds these up; each rank gets the block of the sum that belongs to its weights
    3. each rank updates its own block of the weights; it alone keeps the optimizer's state (momentum) for them
    4. allgather        rebuilds the whole weight vector on every rank

An allreduce in place of 2 and 4 would move as many bytes, but every rank would have to keep all of the momentum and do
the whole update. Sharing out the optimizer's state is known as ZeRO stage 1 (Rajbhandari et al., 2020).

With --compare (the default) rank 0 also trains alone, on the same batches and without pyreduce; the exit status is 1 if
the losses differ by more than rounding. scikit-learn brings the digits; nothing is downloaded.

With --slow RANK:SECONDS one rank sleeps before each synchronisation of the gradients. Who holds up the others, a trace
tells:

    PYREDUCE_TRACE=DIR mpirun -n 4 python examples/train_digits.py --slow 2:0.01
    python -m pyreduce.trace summary DIR
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import pyreduce as pr

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

PIXELS, DIGITS = 64, 10
TEST_IMAGES = 360
MOMENTUM = 0.9
TOLERANCE = 1e-9  # relative; a forgotten shard or a wrong division shows up in the first digits


class Images(NamedTuple):
    """Images as rows of pixels from 0 to 1, and the digits they show."""

    pixels: Array
    digits: Indices


def load_images() -> tuple[Images, Images]:
    """Training and test images, the same on every rank."""
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(digits))
    pixels, digits = pixels[order] / 16.0, digits[order].astype(np.int64)
    train, test = slice(TEST_IMAGES, None), slice(TEST_IMAGES)
    return Images(pixels[train], digits[train]), Images(pixels[test], digits[test])


def initial_weights(hidden: int) -> Array:
    """The flat weight vector to start from: 75 * hidden + 10 numbers, the same on every rank."""
    rng = np.random.default_rng(1)
    w1 = rng.normal(0.0, PIXELS**-0.5, PIXELS * hidden)
    w2 = rng.normal(0.0, hidden**-0.5, hidden * DIGITS)
    return np.concatenate([w1, np.zeros(hidden), w2, np.zeros(DIGITS)])


def layers(flat: Array) -> tuple[Array, Array, Array, Array]:
    """Views into a flat vector: weights and biases of the two layers."""
    hidden = (len(flat) - DIGITS) // (PIXELS + 1 + DIGITS)
    w1, b1, w2, b2 = np.split(flat, np.cumsum([PIXELS * hidden, hidden, hidden * DIGITS]))
    return w1.reshape(PIXELS, hidden), b1, w2.reshape(hidden, DIGITS), b2


def loss_and_gradient(weights: Array, images: Images) -> tuple[float, Array]:
    """Cross-entropy and its gradient, both summed (not averaged) over the images; zero for no images."""
    w1, b1, w2, b2 = layers(weights)
    activity = np.tanh(images.pixels @ w1 + b1)
    scores = activity @ w2 + b2
    scores -= scores.max(axis=1, keepdims=True)
    log_chances = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    rows = np.arange(len(images.digits))
    loss = -float(log_chances[rows, images.digits].sum())

    slope = np.exp(log_chances)  # of the loss, by score
    slope[rows, images.digits] -= 1.0
    hidden_slope = (slope @ w2.T) * (1.0 - activity**2)
    gradient = np.empty_like(weights)
    g1, c1, g2, c2 = layers(gradient)
    g1[:], c1[:] = images.pixels.T @ hidden_slope, hidden_slope.sum(axis=0)
    g2[:], c2[:] = activity.T @ slope, slope.sum(axis=0)
    return loss, gradient


def batches(images: Images, size: int, epoch: int) -> Iterator[Images]:
    """The global batches of an epoch, in an order that depends on nothing but the epoch; the last may be smaller."""
    order = np.random.default_rng([2, epoch]).permutation(len(images.digits))
    for first in range(0, len(order), size):
        chosen = order[first : first + size]
        yield Images(images.pixels[chosen], images.digits[chosen])


def shard(batch: Images, comm: MPI.Intracomm) -> Images:
    """This rank's share of a global batch; it may be empty."""
    mine = np.array_split(np.arange(len(batch.digits)), comm.size)[comm.rank]
    return Images(batch.pixels[mine], batch.digits[mine])


def train_together(images: Images, options: argparse.Namespace, comm: MPI.Intracomm) -> tuple[Array, list[float]]:
    """Train on all ranks of `comm`; the weights and the mean loss of each epoch, the same on every rank."""
    weights = initial_weights(options.hidden)
    my_weights = np.array_split(weights, comm.size)[comm.rank]  # a view: the block that reduce_scatter gives this rank
    my_momentum = np.zeros_like(my_weights)  # ZeRO-1: optimizer state for this rank's share only
    losses = []
    for epoch in range(options.epochs):
        my_loss = np.zeros(1)
        for batch in batches(images, options.batch, epoch):
            # Shards differ by one image if the batch does not divide evenly. That is why gradients are summed, and
            # divided by the size of the global batch: a mean of the ranks' means would weigh images differently.
            my_images = shard(batch, comm)
            loss, gradient = loss_and_gradient(weights, my_images)
            if comm.rank == options.slow[0]:
                time.sleep(options.slow[1])
            my_gradient = pr.reduce_scatter(gradient, comm=comm, algorithm=options.algorithm)
            my_momentum[:] = MOMENTUM * my_momentum + my_gradient / len(batch.digits)
            my_weights -= options.lr * my_momentum
            # In place: this rank's block already lies where it belongs in `weights`; the others' arrive around it.
            pr.allgather(pr.IN_PLACE, weights, comm=comm, algorithm=options.algorithm)
            my_loss += loss
        losses.append(float(pr.allreduce(my_loss, comm=comm)[0]) / len(images.digits))
    return weights, losses


def train_alone(images: Images, options: argparse.Namespace) -> list[float]:
    """The same training in one process, without pyreduce; the mean loss of each epoch."""
    weights = initial_weights(options.hidden)
    momentum = np.zeros_like(weights)
    losses = []
    for epoch in range(options.epochs):
        total = 0.0
        for batch in batches(images, options.batch, epoch):
            loss, gradient = loss_and_gradient(weights, batch)
            momentum = MOMENTUM * momentum + gradient / len(batch.digits)
            weights -= options.lr * momentum
            total += loss
        losses.append(total / len(images.digits))
    return losses


def deviation(together: list[float], alone: list[float]) -> float:
    """The largest relative difference of two runs' losses.

    It is not zero although both add up the same numbers. Floating-point addition depends on the order: alone, a matrix
    product sums over the whole batch; together, each rank sums over its shard, and then the shards' sums are folded, by
    the ring even in another order for each block. Each step feeds such last-bit differences into the next. Two runs
    on the same number of ranks with the same algorithm do agree in every bit of what pyreduce computes.
    """
    return float(np.max(np.abs(np.subtract(together, alone)) / np.abs(alone)))


def accuracy(weights: Array, images: Images) -> float:
    """The share of images whose digit gets the highest score."""
    w1, b1, w2, b2 = layers(weights)
    scores = np.tanh(images.pixels @ w1 + b1) @ w2 + b2
    return float(np.mean(scores.argmax(axis=1) == images.digits))


def report(losses: list[float], alone: list[float], test_accuracy: float) -> int:
    """Print the outcome; the exit status."""
    print("epoch   loss, together" + ("   loss, alone" if alone else ""))
    for epoch, loss in enumerate(losses):
        print(f"{epoch + 1:5d}   {loss:.12f}" + (f"   {alone[epoch]:.12f}" if alone else ""))
    print(f"accuracy on {TEST_IMAGES} test images: {test_accuracy:.3f}")
    if not alone:
        return 0
    largest = deviation(losses, alone)
    equal = largest <= TOLERANCE  # False for NaN too
    verdict = "within" if equal else "NOT within"
    print(f"largest relative difference of the losses: {largest:.1e}, {verdict} {TOLERANCE}")
    print("OK" if equal else "WRONG: training together is not training alone")
    return 0 if equal else 1


def rank_and_seconds(text: str) -> tuple[int, float]:
    """What ``--slow`` takes."""
    rank, _, seconds = text.partition(":")
    if int(rank) < 0 or not 0 <= float(seconds) < float("inf"):
        raise ValueError(text)
    return int(rank), float(seconds)


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="data-parallel training on handwritten digits")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=100, help="images in a global batch, over all ranks")
    # 75 * 31 + 10 = 2335 weights are divisible by none of 2, 3 and 4: blocks differ, and nothing has to be padded.
    parser.add_argument("--hidden", type=int, default=31, help="hidden units")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate")
    parser.add_argument("--algorithm", choices=pr.algorithms.names(), help="default: chosen by size")
    parser.add_argument(
        "--compare", action=argparse.BooleanOptionalAction, default=True, help="train alone, too, and compare losses"
    )
    parser.add_argument(
        "--slow", type=rank_and_seconds, default=(-1, 0.0), metavar="RANK:SECONDS", help="a rank that comes late"
    )
    options = parser.parse_args(argv)
    if min(options.epochs, options.batch, options.hidden) < 1:
        parser.error("--epochs, --batch and --hidden must be 1 or more")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Train and report; the exit status, the same on every rank."""
    options = parse_options(argv)
    comm = MPI.COMM_WORLD
    try:
        train, test = load_images()
    except ImportError as error:
        print(f"the digits come with scikit-learn (pip install scikit-learn): {error}", file=sys.stderr)
        return 2
    if comm.rank == 0:
        shares = [len(share) for share in np.array_split(initial_weights(options.hidden), comm.size)]
        print(f"{len(train.digits)} images, {sum(shares)} weights on {comm.size} ranks, which own {shares} of them")
    weights, losses = train_together(train, options, comm)
    status = 0
    if comm.rank == 0:
        alone = train_alone(train, options) if options.compare else []
        status = report(losses, alone, accuracy(weights, test))
    return int(comm.bcast(status, root=0))


if __name__ == "__main__":
    sys.exit(main())
