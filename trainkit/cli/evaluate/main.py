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

The first form takes the folder of a run, or a checkpoint in one, with the run's own
configuration. Of a folder it takes the best checkpoint. OVERRIDES change the
configuration: key=value for a run of trainkit train, --key=value for one of trainkit
fit. It {writes} in that folder.

The second form is the Lightning CLI. trainkit {verb} --help describes its options.

examples:
  trainkit {verb} outputs/MyModule/2026-01-31_12-00-00-1a2b data.batch_size=64
  trainkit {verb} lightning_logs/version_0/checkpoints/last.ckpt --data.batch_size=64
"""

_WRITES = {
    "validate": "writes validate.json",
    "test": "writes test.json",
    "predict": "writes predictions.csv or predictions.jsonl, and predict.json,",
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
    if words[0].startswith("-"):
        from trainkit.cli.fit.main import main as lightning

        if words[0] in ("-h", "--help"):
            print(text)
        return lightning(argv)
    if {"-h", "--help"} & set(words):
        print(text, end="")
        return 0
    return _evaluate(verb, words[0], words[1:], argv)


def _evaluate(verb: str, named: str, words: Sequence[str], argv: Sequence[str]) -> int:
    from trainkit.cli.evaluate import of_fit, of_train
    from trainkit.cli.evaluate.place import find
    from trainkit.cli.evaluate.trainers import forget_trainings
    from trainkit.cli.runs.ranks import ranks_of_one_run
    from trainkit.lit._compat import replaced
    from trainkit.lit.quiet import without_advice

    find_modules_here()
    place = find(verb, named)
    # Lightning starts other ranks with the words of this process.
    same = replaced(sys, argv=[*sys.argv[:1], *argv])
    with without_advice(), same:
        forget_trainings()
        make = of_train.make if place.config is None else of_fit.make
        evaluation = make(verb, place, words)
        shown = place.checkpoint.shown(place.folder.path)
        if evaluation.trainer.is_global_zero:
            print(f"trainkit | {verb}: {shown}", flush=True)
        with ranks_of_one_run(evaluation.trainer):
            facts = _run(evaluation, verb)
    if evaluation.trainer.is_global_zero:
        evaluation.show(facts)
    return 0


def _run(evaluation: Any, verb: str) -> dict[str, Any]:
    from trainkit.cli.errors import Interrupted, TrainingFailed, is_mistake
    from trainkit.cli.evaluate.evaluation import does_not_fit
    from trainkit.cli.runs.checkpoint import was_restoring
    from trainkit.lit.front.exact_resume import find_stop

    try:
        return evaluation.run()
    except SystemExit as end:
        stopped = find_stop(evaluation.trainer).stopped_by
        if stopped is None:
            raise
        print(f"trainkit | stopped by {stopped.name}; nothing was written", flush=True)
        raise Interrupted(stopped) from end
    except Exception as error:
        if is_mistake(error):
            raise
        if was_restoring(error):
            raise does_not_fit(evaluation, error) from error
        raise TrainingFailed.by(error) from error
