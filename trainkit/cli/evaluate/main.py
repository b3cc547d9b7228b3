"""`trainkit validate | test | predict`: a run, or with options Lightning's CLI."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from trainkit.cli.words import find_modules_here
from trainkit.errors import TrainkitError

HELP = """\
usage: trainkit {verb} RUN [OVERRIDES]
       trainkit {verb} --model=... --data=... --ckpt_path=... [OPTIONS]

The first form takes the folder of a run of trainkit train, or a checkpoint in one, with
the run's own configuration, which OVERRIDES change: key=value. Of a folder it takes the
best checkpoint. It writes {writes} in that folder.

The second form is the Lightning CLI. trainkit {verb} --help describes its options.

examples:
  trainkit {verb} outputs/MyModule/2026-01-31_12-00-00-1a2b data.batch_size=64
  trainkit {verb} --config=lightning_logs/version_0/config.yaml --ckpt_path=...
"""

_WRITES = {
    "validate": "validate.json",
    "test": "test.json",
    "predict": "predictions.csv and predict.json",
}


def main(argv: list[str]) -> int:
    """Evaluate a run; with options alone, run the Lightning CLI.

    Args:
        argv: the sub-command's name, then its arguments.

    Returns:
        the exit status.
    """
    verb, *words = argv
    text = HELP.format(verb=verb, writes=_WRITES[verb])
    if not words:
        raise TrainkitError(
            f"trainkit {verb}: must be given a run or options, received nothing.\n"
            f"{text.rstrip()}"
        )
    if {"-h", "--help"} & set(words):
        print(text, flush=True)
    if words[0].startswith("-"):
        from trainkit.cli.fit.main import main as lightning

        return lightning(argv)
    return 0 if {"-h", "--help"} & set(words) else _of_a_run(verb, words, argv)


def _of_a_run(verb: str, words: Sequence[str], argv: Sequence[str]) -> int:
    from trainkit.cli.door import spoken
    from trainkit.cli.evaluate.evaluation import configured, evaluate
    from trainkit.cli.runs.checkpoint import find
    from trainkit.cli.runs.ranks import ranks_of_one_run
    from trainkit.lit._compat import replaced
    from trainkit.lit.aside import without_advice

    find_modules_here()
    folder, checkpoint = find(verb, words[0])
    # Lightning starts other ranks with the words of this process.
    same = replaced(sys, argv=[*sys.argv[:1], *argv])
    with without_advice(), same, spoken("train"):
        training = configured(verb, folder, words[1:])
        with ranks_of_one_run(training.trainer):
            facts = evaluate(verb, training, checkpoint, folder, words[1:])
    if training.trainer.is_global_zero:
        _show(verb, facts, folder)
    return 0


def _show(verb: str, facts: dict[str, Any], folder: Any) -> None:
    """Print the result."""
    from trainkit.cli.evaluate.evaluation import STEPS
    from trainkit.cli.runs.summary import show_written

    rows = [
        (name, "not finite" if value is None else f"{value:.6g}")
        for name, value in facts["metrics"].items()
    ]
    if verb == "predict":
        none = "predict_step has returned nothing, so there are no rows"
        rows.append(
            ("predictions", f"{facts['rows']:,} rows" if facts["file"] else none)
        )
    elif not rows:
        rows.append((verb, f"{STEPS[verb]} has logged nothing"))
    files = [each for each in (f"{verb}.json", facts.get("file")) if each]
    show_written(rows, folder.path, sorted(files))
