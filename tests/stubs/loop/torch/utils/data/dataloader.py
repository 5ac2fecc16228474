"""A loader of numbers, whose iterator has the class that the agent hooks."""


class _BaseDataLoaderIter:
    def __init__(self, count: int) -> None:
        self._left = iter(range(count))

    def __next__(self) -> int:
        return next(self._left)

    def __iter__(self) -> "_BaseDataLoaderIter":
        return self


class DataLoader:
    """Gives the numbers from 0 on."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> _BaseDataLoaderIter:
        return _BaseDataLoaderIter(self._count)
