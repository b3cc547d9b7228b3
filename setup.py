"""What pyproject.toml cannot say: an editable install that no folder hides.

In the folder that holds the clone, Python takes the clone, a folder `trainkit` without
`__init__.py`, for a namespace package. Any package on `sys.path` goes before that, but
setuptools' finder of editable packages is asked only after all of `sys.path`. So this
makes it the finder of one more entry at the end of `sys.path`.
"""

from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py

ENTRY = str(Path(__file__).resolve().with_name("__editable__.trainkit"))
"""A folder that does not exist."""

PTH = f"""\
import sys; e = {ENTRY!a}; e in sys.path or sys.path.append(e); \
sys.path_importer_cache[e] = next(\
(f for f in sys.meta_path if "editable___lightning_trainkit" in str(f)), None)
"""


class BuildPy(build_py):
    """Adds a .pth file to an editable wheel, to be read after setuptools' own."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            install: Any = self.get_finalized_command("install")
            Path(install.install_lib, "lightning_trainkit.pth").write_text(
                PTH, encoding="ascii"
            )


setup(cmdclass={"build_py": BuildPy})
