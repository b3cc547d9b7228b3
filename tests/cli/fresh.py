"""Commands in a new interpreter, each in a fork: what they load, say and end with.

This file is also the program of that interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

HEAVY = {"torch", "lightning", "hydra", "wandb", "torchmetrics", "matplotlib.pyplot"}
HEAVY |= {"numpy", "omegaconf", "rich"}

ASKED = {
    "_ARGCOMPLETE": "1",
    "_ARGCOMPLETE_IFS": "\n",
    "_ARGCOMPLETE_STDOUT_FILENAME": "/dev/stdout",
    "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
}
"""By these variables a shell asks what a line may become."""


@dataclass(frozen=True)
class Answer:
    """What became of a command; `loaded` are those of `HEAVY`."""

    status: int
    out: str
    err: str
    loaded: list[str]


def fresh(
    commands: Iterable[Sequence[str] | str],
    folder: Path,
    *,
    first: Sequence[str] = (),
    hidden: Sequence[str] = (),
) -> list[Answer]:
    """Run commands in a folder, with no setting of the user's.

    Args:
        commands: the words of each; a text is a line for which a shell asks.
        folder: the current one.
        first: modules that are imported once, before the forks.
        hidden: modules that cannot be imported.
    """
    asked = {"commands": [*commands], "first": first, "hidden": hidden}
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C.UTF-8"}
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(asked)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return [Answer(**each) for each in json.loads(done.stdout)]


def _answer(words: list[str] | str) -> dict[str, object]:
    from trainkit.cli.main import main

    with tempfile.TemporaryDirectory() as folder:
        files = [open(f"{folder}/{name}", "w+") for name in ("out", "err", "rest")]
        if not (child := os.fork()):
            os.dup2(files[0].fileno(), 1)
            os.dup2(files[1].fileno(), 2)
            if isinstance(words, str):
                os.environ |= ASKED | {
                    "COMP_LINE": words,
                    "COMP_POINT": f"{len(words)}",
                }
                words = ["completion"]
            try:
                status = main(words)
            except SystemExit as end:
                status = int(end.code or 0)
            except BaseException as error:  # of a hidden module
                status = repr(error)
            sys.stdout.flush()
            sys.stderr.flush()
            known = [status, sorted(HEAVY & {n for n, m in sys.modules.items() if m})]
            print(json.dumps(known), file=files[2], flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        out, err, rest = (Path(each.name).read_text() for each in files)
    status, loaded = json.loads(rest)
    return {"status": status, "out": out, "err": err, "loaded": loaded}


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    sys.path.pop(0)  # this folder, whose names are those of packages
    sys.modules.update(dict.fromkeys(asked["hidden"]))  # type: ignore[arg-type]
    for name in asked["first"]:
        import_module(name)
    print(json.dumps([_answer(words) for words in asked["commands"]]))
