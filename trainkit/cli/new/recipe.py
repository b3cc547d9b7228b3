"""A recipe as files of a project of one's own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

_OTHERS = re.compile(r"^( *)from trainkit\.recipes import ([\w, ]+?) *(#.*)?$", re.M)
_TARGET = re.compile(r"\btrainkit\.recipes\.(\w+)\.(\w+)")
_CHOSEN = re.compile(r"- override /(model|data): (\w+)")


class Recipe:
    """A recipe, and what a copy of it consists of.

    Args:
        name: one of `names()`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.source = _path_of(name).read_text()
        self.experiment = _yaml("experiment", name)

    @staticmethod
    def names() -> list[str]:
        folders = Path(str(files("trainkit.recipes"))).glob("*/__init__.py")
        return sorted(path.parent.name for path in folders)

    @property
    def title(self) -> str:
        """The first line of what its file says about itself."""
        return (ast.get_docstring(ast.parse(self.source)) or "").splitlines()[0]

    @property
    def learning_rate(self) -> float:
        """The rate of its experiment, or else its module's own or its optimizer's."""
        chosen = dict(
            re.findall(r"override /(model|optimizer): (\w+)", self.experiment)
        )
        texts = [self.experiment, *(_yaml(*option) for option in chosen.items()
                                    if option[1] != "none")]  # fmt: skip
        return float(re.findall(r"^ *lr: (\S+)", "\n".join(texts), re.M)[0])

    def has(self, method: str) -> bool:
        return f"def {method}(" in self.source

    def modules(self) -> dict[str, str]:
        """The Python files of a copy: the recipe, and what it takes from others."""
        copied: dict[str, str] = {}
        wanted = [self.name]
        for text in self.configuration("").values():
            wanted += re.findall(r"_target_: (\w+)\.\w+$", text, re.M)
        while wanted:
            name = wanted.pop()
            if f"{name}.py" in copied:
                continue
            text = _path_of(name).read_text()
            wanted += [other for found in _OTHERS.finditer(text) for other in
                       re.findall(r"\w+", found[2])]  # fmt: skip
            copied[f"{name}.py"] = _OTHERS.sub(r"\1import \2", text)
        own = copied[f"{self.name}.py"].replace(f'"experiment={self.name}", ', "")
        own = own.replace(f'    "experiment={self.name}",\n    ', "    ")
        about = (
            f"Copied from the recipe {self.name} of trainkit. It is yours to change."
        )
        rest = own.splitlines(keepends=True)[ast.parse(own).body[0].end_lineno :]
        own = f'"""{self.title}\n\n{about}\n"""\n{"".join(rest)}'
        return {**copied, f"{self.name}.py": own}

    def configuration(self, project: str) -> dict[str, str]:
        """The YAML files of a copy, which name the classes of its own files."""
        texts = {"conf/experiment/default.yaml": self._default(project)}
        for group, option in _CHOSEN.findall(self.experiment):
            texts[f"conf/{group}/{option}.yaml"] = _yaml(group, option)
        return {path: _TARGET.sub(r"\1.\2", text) for path, text in texts.items()}

    def _default(self, project: str) -> str:
        named = re.sub(r"^name: .*$", f"name: {project}", self.experiment, flags=re.M)
        return named.replace(
            f"# trainkit train experiment={self.name}\n",
            "# trainkit train, if it names no other experiment\n",
        )

    def missing_packages(self) -> list[str]:
        """What its files import and this environment does not have."""
        trees = [ast.parse(text) for text in self.modules().values()]
        own = {path.removesuffix(".py") for path in self.modules()}
        found = {name for tree in trees for name in _imported(tree)}
        return sorted(name for name in found - own if find_spec(name) is None)


def _imported(tree: ast.AST) -> Iterator[str]:
    """The top-level packages that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _path_of(name: str) -> Path:
    folder = Path(str(files("trainkit.recipes")))
    package = folder / name / f"{name}.py"
    return package if package.is_file() else folder / f"{name}.py"


def _yaml(group: str, option: str) -> str:
    return (Path(str(files("trainkit.conf"))) / group / f"{option}.yaml").read_text()
