"""Real training steps to replay: models' gradients, packed into buckets, and how a step synchronises them.

The shapes are those of the models' parameters, in the order in which the model registers them. Gradients come in the
reverse order, and are packed as they come: a bucket is closed before the tensor that would take it past the limit, so
a tensor longer than the limit is a bucket of its own. (torch's DDP closes it after the tensor that takes it there, and
makes its first bucket 1 MiB; the sizes are much the same.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from mpi4py import MPI

import pyreduce as pr
from pyreduce.bench.cases import CASES, Array, Buffers, Call, Case, Problem
from pyreduce.blocks import offsets

__all__ = ["BUCKET", "MODELS", "STEPS", "Workload", "make_workload", "pack"]

Shape = tuple[int, ...]
BUCKET = 25 << 20  # bytes, DDP's default


def _resnet50() -> list[Shape]:
    """ResNet-50 of torchvision: stages of bottlenecks, the first of each with a projection beside it."""
    shapes = [*_convolution(64, 3, 7)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [*_convolution(width, channels, 1), *_convolution(width, width, 3)]
            shapes += _convolution(4 * width, width, 1)
            if block == 0:
                shapes += _convolution(4 * width, channels, 1)
            channels = 4 * width
    return [*shapes, *_linear(1000, channels)]


def _bert_base() -> list[Shape]:
    """BERT base, uncased: Hugging Face's `BertModel` with its pooler."""
    wide = 768
    shapes: list[Shape] = [(30522, wide), (512, wide), (2, wide), *_norm(wide)]
    for _ in range(12):
        shapes += [*4 * _linear(wide, wide), *_norm(wide)]
        shapes += [*_linear(4 * wide, wide), *_linear(wide, 4 * wide), *_norm(wide)]
    return [*shapes, *_linear(wide, wide)]


def _gpt2() -> list[Shape]:
    """GPT-2 small of Hugging Face: its head is the embedding, its weights lie transposed."""
    wide = 768
    shapes: list[Shape] = [(50257, wide), (1024, wide)]
    for _ in range(12):
        shapes += [*_norm(wide), (wide, 3 * wide), (3 * wide,), (wide, wide), (wide,)]
        shapes += [*_norm(wide), (wide, 4 * wide), (4 * wide,), (4 * wide, wide), (wide,)]
    return [*shapes, *_norm(wide)]


def _convolution(outputs: int, inputs: int, side: int) -> list[Shape]:
    """A convolution without bias, and its batch norm."""
    return [(outputs, inputs, side, side), *_norm(outputs)]


def _linear(outputs: int, inputs: int) -> list[Shape]:
    return [(outputs, inputs), (outputs,)]


def _norm(width: int) -> list[Shape]:
    return [(width,), (width,)]


MODELS: dict[str, Callable[[], list[Shape]]] = {"resnet50": _resnet50, "bert-base": _bert_base, "gpt2": _gpt2}
"""The shapes of each model's parameters, in the order of registration."""


@dataclass(frozen=True)
class Workload:
    """One training step's gradients.

    Attributes
    ----------
    itemsize : int
        Bytes of an element.
    scale : int
        By how much the tensors are shorter than the model's.
    bucket : int
        The limit of a bucket, in bytes.
    tensors : int
    buckets : tuple of int
        Elements of each bucket, in the order in which they are synchronised.
    """

    name: str
    itemsize: int
    scale: int
    bucket: int
    tensors: int
    buckets: tuple[int, ...]

    @property
    def parameters(self) -> int:
        """Elements of all gradients."""
        return sum(self.buckets)

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return self.parameters * self.itemsize


def make_workload(name: str, itemsize: int, bucket: int | None = None, scale: int = 1) -> Workload:
    """Pack the gradients of a model.

    Parameters
    ----------
    name : str
        One of `MODELS`.
    itemsize : int
        Bytes of an element.
    bucket : int, optional
        The limit of a bucket, in bytes; by default DDP's, shortened like the tensors.
    scale : int, optional
        Shorten every tensor so much, to one element at least.
    """
    tensors = [-(-prod(shape) // scale) for shape in reversed(MODELS[name]())]
    limit = max(BUCKET // scale, 1) if bucket is None else bucket
    return Workload(name, itemsize, scale, limit, len(tensors), tuple(pack(tensors, limit // itemsize)))


def pack(tensors: Iterable[int], limit: int) -> list[int]:
    """Lengths of the buckets that tensors of these lengths fill one after the other.

    >>> pack([3, 4, 3, 12, 1, 1], 10)
    [10, 12, 2]
    """
    buckets: list[int] = []
    for length in tensors:
        if buckets and buckets[-1] + length <= limit:
            buckets[-1] += length
        else:
            buckets.append(length)
    return buckets


class _Step:
    """How a step synchronises its buckets; a `Case` whose vector is all gradients, bucket after bucket."""

    name: str
    doubled = True
    places: tuple[bool, ...] = (False,)
    collectives: tuple[str, ...]

    def __init__(self, workload: Workload) -> None:
        self._buckets = workload.buckets

    def source(self, problem: Problem) -> slice:
        return problem.whole

    def result(self, problem: Problem) -> slice:
        return problem.whole

    def source_in_place(self, problem: Problem) -> slice:
        return problem.whole

    def inputs(self, problem: Problem, start: int, stop: int) -> Array:
        return problem.inputs(start, stop)

    def expected(self, problem: Problem) -> Array:
        return CASES["allreduce"].expected(problem)

    def parts(self, problem: Problem) -> list[tuple[str, Problem]]:
        return [(name, bucket) for name in self.collectives for _, bucket in self._cut(problem)]

    def native(self, comm: MPI.Intracomm, problem: Problem, buffers: Buffers, in_place: bool) -> Call:
        calls = [case.native(comm, bucket, pair, within) for case, bucket, pair, within in self._plan(problem, buffers)]
        return lambda: _make(calls)

    def pyreduce(
        self, comm: pr.Communicator, problem: Problem, buffers: Buffers, in_place: bool, algorithm: str | None
    ) -> Call:
        calls = [case.pyreduce(comm, bucket, pair, within, algorithm)
                 for case, bucket, pair, within in self._plan(problem, buffers)]  # fmt: skip
        return lambda: _make(calls)

    def _plan(self, problem: Problem, buffers: Buffers) -> Iterator[tuple[Case, Problem, Buffers, bool]]:
        """The calls of a step: each bucket's problem, its part of the buffers, whether in place."""
        raise NotImplementedError

    def _cut(self, problem: Problem) -> Iterator[tuple[slice, Problem]]:
        """Where each bucket lies, and its own problem."""
        for first, rows in zip(offsets(self._buckets), self._buckets, strict=True):
            yield slice(first, first + rows), Problem(rows, problem.op, problem.dtype, problem.nranks, problem.rank)


class _Sharded(_Step):
    """All buckets are reduce-scattered, each into this rank's shard of it; then all are gathered, around the shards."""

    name = "reduce_scatter+allgather"
    collectives = ("reduce_scatter", "allgather")

    def _plan(self, problem: Problem, buffers: Buffers) -> Iterator[tuple[Case, Problem, Buffers, bool]]:
        for part, bucket in self._cut(problem):
            shard = buffers.buffer[part][bucket.own]
            yield CASES["reduce_scatter"], bucket, Buffers(buffers.source[part], shard), False
        for part, bucket in self._cut(problem):
            yield CASES["allgather"], bucket, Buffers(buffers.source[part], buffers.buffer[part]), True


class _Replicated(_Step):
    """All buckets are allreduced, one after the other."""

    name = "allreduce"
    collectives = ("allreduce",)

    def _plan(self, problem: Problem, buffers: Buffers) -> Iterator[tuple[Case, Problem, Buffers, bool]]:
        for part, bucket in self._cut(problem):
            yield CASES["allreduce"], bucket, Buffers(buffers.source[part], buffers.buffer[part]), False


STEPS: dict[str, Callable[[Workload], Case]] = {step.name: step for step in (_Sharded, _Replicated)}
"""Every way of synchronising a step, by its name."""


def _make(calls: Sequence[Call]) -> None:
    for call in calls:
        call()
