# mypy: ignore-errors
"""Runs inside a sandbox, in the user's virtual environment, and never in the daemon: gives matplotlib the backend of
k8e_figures.py where a program chooses none. Loaded when matplotlib is imported, by the finder of `k8e_matplotlib.pth`.
"""

import importlib.util
import sys

BACKEND = "module://k8e_figures"


def find_matplotlib(finder):
    """Returns the import spec of matplotlib, which is given its backend once it is loaded."""
    sys.meta_path.remove(finder)
    spec = importlib.util.find_spec("matplotlib")
    if spec is not None and spec.loader is not None:
        spec.loader = Loader(spec.loader)
    return spec


class Loader:
    """Loads a module as its own loader does, and leaves no trace in it."""

    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        try:
            settings = module.rcParams
            # A plain look: the module's own look-up would choose a backend now.
            if dict.__getitem__(settings, "backend") is module.rcsetup._auto_backend_sentinel:  # noqa: SLF001
                settings["backend"] = BACKEND
        except (AttributeError, KeyError, TypeError, ValueError):
            pass  # a version that is made otherwise: figures are not shown, as without this module
