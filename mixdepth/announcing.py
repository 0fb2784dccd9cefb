"""Registers routed models with transformers as soon as transformers is imported, and imports nothing before that."""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

AUTO_CONFIG = "transformers.models.auto.configuration_auto"
"""The module of transformers in which AutoConfig looks up model types."""


def announce() -> None:
    """Register routed models now if AutoConfig is there already, and otherwise when it is imported."""
    if AUTO_CONFIG in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    from mixdepth.hf.registration import register

    register()


class _Finder(MetaPathFinder):
    """Finds the module of AutoConfig where it is, and has routed models registered once it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != AUTO_CONFIG:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Executes the module as its own loader does, and registers routed models afterwards."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        _register()
