"""`k8e cluster build`: the programs and images of a cluster, in one folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from k8e.cli.process import Failure
from k8e.cli.view import show_value
from k8e.cluster.build import build_components, default_cache
from k8e.cluster.programs import USUAL, copy_programs, write_sums
from k8e.cluster.sandbox_image import write_sandbox_image

if TYPE_CHECKING:
    import argparse


def build(options: argparse.Namespace) -> int:
    target = Path(options.output or USUAL).absolute()
    if options.sandbox_root and options.without_sandboxes:
        hint = "leave one of them out"
        raise Failure("usage", "--sandbox-root is of no use with --without-sandboxes", hint=hint)
    components = build_components(default_cache(), say, addons=True)
    try:
        copy_programs(components, target)
        if not options.without_sandboxes:
            write_sandbox_image(target, Path(options.sandbox_root) if options.sandbox_root else None, say)
        sums = write_sums(target)
    except OSError as error:
        hint = "name another folder with --output, or use sudo"
        raise Failure("output_unusable", f"{target} cannot be written", detail=str(error), hint=hint) from error
    show_value({"ok": True, "output": str(target), "sums": str(sums)})
    return 0


def say(text: str) -> None:
    sys.stderr.write(f"cluster: {text}\n")
    sys.stderr.flush()
