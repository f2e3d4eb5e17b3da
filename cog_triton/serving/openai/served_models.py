"""Served models: the base model and its LoRA adapters, as `model` of a request names them."""

from __future__ import annotations

from typing import Any

from cog_triton.errors import InvalidArgument, NotFound, nearest
from cog_triton.serving.adapter_store import AdapterStore

_SHOWN = 20


class ServedModels:
    """Models by the name that requests give; adapters come and go while the server runs."""

    def __init__(self, base: str, adapters: AdapterStore | None = None) -> None:
        """`base` is the name of the base model; raises E1005 if an adapter has it, too."""
        self.base = base
        self._adapters = adapters
        if adapters is not None and adapters.get(base) is not None:
            raise InvalidArgument(f"lora_name={base!r}: is the name of the base model")

    def adapter(self, model: str) -> str | None:
        """The adapter that `model` names, None for the base model; raises E1009."""
        if model == self.base:
            return None
        names = list(self._adapters.adapters()) if self._adapters else []
        if model in names:
            return model
        served = f"the model is {self.base!r}"
        if names:
            served += f", its adapters are {', '.join(map(repr, names[:_SHOWN]))}"
        hint = nearest(model[:200], [self.base, *names])
        raise NotFound(f"model={model[:80]!r}: not served here; {served}{hint}")

    def object(self, base: dict[str, Any], adapter: str | None) -> dict[str, Any]:
        """The model object of an adapter, or of the base model, which is `base`."""
        return base if adapter is None else {**base, "id": adapter, "parent": self.base}

    def objects(self, base: dict[str, Any]) -> list[dict[str, Any]]:
        """The model objects of the base model and of each adapter."""
        names = self._adapters.adapters() if self._adapters else {}
        return [base, *(self.object(base, name) for name in names)]
