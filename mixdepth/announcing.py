"""Announces routed models to transformers as soon as transformers is imported, and imports nothing before that.

`import mixdepth` puts a finder at the front of `sys.meta_path`.
The other finders find the module of AutoConfig, and this one registers routed model types when that module has run.
It stays in the list, so that the types are registered again when the module is reloaded.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

AUTO_CONFIG = "transformers.models.auto.configuration_auto"
"""The module of transformers in which AutoConfig looks up model types."""


def announce() -> None:
    """Register routed models now if AutoConfig is imported already, and otherwise when it is."""
    if not any(isinstance(finder, AutoConfigFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, AutoConfigFinder())
    if AUTO_CONFIG in sys.modules:
        register()


def register() -> None:
    """Register routed model types with AutoConfig. A later import of the same module finds them registered."""
    from mixdepth.hf.registration import register_model_types

    register_model_types()


class AutoConfigFinder(MetaPathFinder):
    """Finds the module of AutoConfig as the other finders do, and adds to its loader that routed models register."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != AUTO_CONFIG:
            return None
        spec = self._spec_of_others(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = RegisteringLoader(spec.loader)
        return spec

    def _spec_of_others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """Ask the finders behind this one; those in front of it have been asked and found nothing."""
        finders = list(sys.meta_path)
        if self in finders:
            finders = finders[finders.index(self) + 1 :]
        for finder in finders:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None


class RegisteringLoader(Loader):
    """Runs a module as its own loader does, and then registers routed models.

    The module keeps its own loader, for all that asks for its source, its resources or its type.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        register()

    def __getattr__(self, name: str) -> Any:
        # The module was found and did not run yet: `get_code`, `get_source` and the like.
        if name == "_loader":  # of a copy, which has no attributes yet
            raise AttributeError(name)
        return getattr(self._loader, name)
