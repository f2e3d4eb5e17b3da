"""Stand-in for what guidellm's data loader takes of torch: an iteration over rows, without workers.

guidellm computes nothing with torch, which is 800 MB.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Generic, TypeVar

_Row = TypeVar("_Row")


class Generator:
    """Of random numbers, which nothing draws as nothing is shuffled."""

    def manual_seed(self, seed: int) -> None:
        """Take any."""


class IterableDataset(Generic[_Row]):
    """Rows to iterate."""


class DataLoader(Generic[_Row]):
    """Batches of one row of an `IterableDataset`, put together by `collate_fn`."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[_Row]], Any],
        batch_size: int = 1,
        shuffle: bool | None = None,
        **_: Any,
    ) -> None:
        if batch_size != 1 or shuffle:
            raise NotImplementedError("batches of one row, in order")
        self.dataset = dataset
        self._collate = collate_fn

    def __iter__(self) -> Iterator[Any]:
        for row in self.dataset:
            yield self._collate([row])


def get_worker_info() -> None:
    """No worker."""


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__dict__.update(members)
    sys.modules[name] = module
    return module


_loader = _module("torch.utils.data.dataloader", DataLoader=DataLoader)
_dataset = _module("torch.utils.data.dataset", IterableDataset=IterableDataset)
_data = _module(
    "torch.utils.data",
    dataloader=_loader,
    dataset=_dataset,
    IterableDataset=IterableDataset,
    get_worker_info=get_worker_info,
)
utils = _module("torch.utils", data=_data)
