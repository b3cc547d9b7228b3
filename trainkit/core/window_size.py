"""The size of windows, which may change between two windows of an epoch."""

from __future__ import annotations


class WindowSize(int):
    """A number of micro-batches in a window, with the batch at which windows began.

    Lightning opens a window if `batch_idx % N == 0` and steps if
    `(batch_idx + 1) % N == 0`. With a plain number that is right only for windows that
    began at batch 0: after a change in mid-epoch, Lightning zeroes inside windows and
    steps with leftovers (Lightning-AI/pytorch-lightning#5334; yolov5#3722). A remainder
    by a `WindowSize` counts from the first window of its size. So this rule stays right
    in Lightning, and in all code that repeats it. Otherwise it is a plain number.

    >>> size = WindowSize(3, first_batch=4)
    >>> [batch_idx % size for batch_idx in (4, 5, 6, 7)]
    [0, 1, 2, 0]
    >>> size == 3, 12 / size, f"{size}"
    (True, 4.0, '3')
    """

    first_batch: int

    def __new__(cls, size: int, first_batch: int = 0) -> WindowSize:
        self = super().__new__(cls, size)
        self.first_batch = first_batch
        return self

    # Python asks the right operand first where its type is a subclass of the left's.
    def __rmod__(self, batch_idx: int) -> int:
        return (batch_idx - self.first_batch) % int(self)

    def __reduce__(self) -> tuple[type[WindowSize], tuple[int, int]]:
        return WindowSize, (int(self), self.first_batch)
