"""An engine that is nothing but its deployment."""

from __future__ import annotations

from typing import Any

from torch import nn

from r3_pass.runtime.engines import Deployment, EngineAdapter


class Engine(EngineAdapter):
    num_slots = max_tokens = 8
    installed = False

    def __init__(self, model: nn.Module, deployment: Deployment) -> None:
        super().__init__()
        self._model, self._deployment = model, deployment

    @classmethod
    def accepts(cls, engine: object) -> bool:
        return False

    @property
    def model(self) -> nn.Module:
        return self._model

    @property
    def deployment(self) -> Deployment:
        return self._deployment

    def install(self, session: Any) -> None:
        self.installed = True

    def uninstall(self) -> None:
        self.installed = False
