# mypy: ignore-errors
"""Runs inside a sandbox, in the user's virtual environment, and never in the daemon: a backend of matplotlib whose
`plt.show()` saves each figure as a file and prints a line that names it, by which clients find it
(doors/mcp/tools/figures.py).
"""

import io
import os
import secrets
import sys
import warnings

from matplotlib._pylab_helpers import Gcf
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

FOLDER = "/tmp/k8e-figures"
KEPT = 64  # files


class FigureManager(FigureManagerBase):
    _saved = b""

    def show(self):
        """A figure that has not changed since is not saved again."""
        content = io.BytesIO()
        self.canvas.figure.savefig(content, format="png")
        image = content.getvalue()
        if image != self._saved and save(image):
            self._saved = image


class FigureCanvas(FigureCanvasAgg):
    manager_class = FigureManager


def show(*args, **settings):
    for manager in Gcf.get_all_fig_managers():
        manager.show()


def save(image):
    """Returns whether it is saved. The program goes on where it cannot be."""
    path = f"{FOLDER}/{secrets.token_hex(8)}.png"
    try:
        os.makedirs(FOLDER, exist_ok=True)
        with open(path, "xb") as file:
            file.write(image)
        remove_oldest()
    except OSError as error:
        warnings.warn(f"the figure cannot be saved: {error}", stacklevel=4)
        return False
    sys.stderr.write(f"k8e: figure saved as {path}\n")
    sys.stderr.flush()
    return True


def remove_oldest():
    files = sorted(os.scandir(FOLDER), key=lambda entry: entry.stat(follow_symlinks=False).st_mtime_ns)
    for entry in files[:-KEPT]:
        os.unlink(entry.path)
