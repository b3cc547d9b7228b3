"""The Lightning CLI with arguments for what trainkit adds.

trainkit fit --model my_module.Net --data my_module.Data --accumulation PerToken
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentError
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from trainkit.config.attach import attach_accumulation
from trainkit.core.checks import Checks
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.strategies import AccumulationStrategy
from trainkit.errors import TrainkitError
from trainkit.lit._compat import replaced
from trainkit.lit.batch_norm.guard import BatchNormGuard
from trainkit.lit.callback.base import has_callback
from trainkit.lit.callback.table import say
from trainkit.lit.front.mixin import AccumulationMixin
from trainkit.lit.proof.report import Proof
from trainkit.lit.rates.lr_scaling import LRScaling
from trainkit.lit.schedule import AccumulationSchedule

ACCUMULATION = "accumulation"
MICRO_BATCHING = "micro_batching"
STRATEGIES = (
    f"--{ACCUMULATION} takes one of PerSample, PerToken, PerClassWeight, Weighed and "
    f"Uniform; the dotted path of a strategy of your own; or a YAML file with one."
)
OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "wide_gradients": (bool, False, "sum gradients in float32 beside bfloat16 ones"),
    "checks": (Checks, "late", "now: stop before the step of a loss not finite"),
    "proof": (Proof, "warn", "what follows if windows are not the big batch"),
}
"""The type, the default value and the help of each option that is one value."""
CALLBACKS: dict[str, type[Callback]] = {
    "lr_scaling": LRScaling,
    "batchnorm": BatchNormGuard,
    "schedule": AccumulationSchedule,
}


class TrainkitCLI(LightningCLI):
    """The Lightning CLI, which also makes trainkit's strategy and callbacks.

        if __name__ == "__main__":
            TrainkitCLI(MyModule, MyData)

    and then

        python train.py fit --accumulation=PerToken --accumulation.ignore_index=-1
            --lr_scaling.rule=linear --lr_scaling.reference_batch=256
            --batchnorm.policy=momentum --schedule.sizes='{0: 8, 10: 4}'
            --micro_batching.tokens=4096

    All of them are off by default. `--accumulation` takes the name of one of trainkit's
    strategies or of an imported subclass, a dotted path, or a YAML file. It works for
    any module: one with `AccumulationMixin` gets the strategy; any other stays
    unchanged, and the callback is added.

    A YAML file may hold `${...}`, which is resolved within it, `${oc.env:NAME,default}`
    too. The constructor's arguments, and everything else, are as in `LightningCLI`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("parser_class", TrainkitParser)
        super().__init__(*args, **kwargs)

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        kwargs.setdefault("parser_mode", "omegaconf")  # files may hold ${...}
        return super().init_parser(**kwargs)

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        # Not in add_arguments_to_parser, which users override.
        super().add_default_arguments_to_parser(parser)
        parser.add_subclass_arguments(
            AccumulationStrategy, ACCUMULATION, required=False
        )
        parser.add_subclass_arguments(MicroBatching, MICRO_BATCHING, required=False)
        for key, (kind, default, about) in OPTIONS.items():
            parser.add_argument(f"--{key}", type=kind, default=default, help=about)
        for key, callback in CALLBACKS.items():
            parser.add_subclass_arguments(callback, key, required=False)

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ValueError as error:
            refusal = _refusal_in(error)
            if refusal is None or refusal is error:
                raise
            raise refusal from error

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config: Any = self.config_init
        written: Any = self.config
        if self.subcommand is not None:
            config, written = config[self.subcommand], written[self.subcommand]
        scaling = config.get("lr_scaling")
        if isinstance(scaling, LRScaling) and scaling.noise_scale is not None:
            # Of a folder that may change the run's config.yaml keeps the number.
            written.lr_scaling.init_args.noise_scale = scaling.noise_scale
        callbacks = [config.get(key) for key in CALLBACKS]
        ours = [
            *attach_accumulation(
                self.model,
                config.get(ACCUMULATION),
                micro_batching=config.get(MICRO_BATCHING),
                **{key: config.get(key, each[1]) for key, each in OPTIONS.items()},
            ),
            *(callback for callback in callbacks if callback is not None),
        ]
        if ours:
            listed = kwargs.get("callbacks", config.trainer.get("callbacks")) or []
            listed = listed if isinstance(listed, list) else [listed]
            kwargs["callbacks"] = [*listed, *ours]
        trainer = super().instantiate_trainer(**kwargs)
        if self.subcommand in (None, "fit"):
            _say_if_plain(self.model, trainer)
        return trainer


def without_running(prog: str, words: Sequence[str], **options: Any) -> Any:
    """The CLI after it has made module, data and Trainer; it runs nothing.

    Args:
        prog: the name of the command, for messages.
        words: its options.
        options: more arguments of `TrainkitCLI`.

    Raises:
        TrainkitError: a mistake in the options.
    """
    try:
        # Given as arguments, Lightning warns that they are not the process's own.
        with replaced(sys, argv=["trainkit", *words]):
            return TrainkitCLI(
                run=False,
                save_config_callback=None,
                parser_kwargs={"prog": prog, "exit_on_error": False},
                **options,
            )
    except ArgumentError as error:
        raise TrainkitError(str(error)) from error


def _say_if_plain(module: Any, trainer: Any) -> None:
    """Say that Lightning counts the micro-batches of a window alike, if it does."""
    number = trainer.accumulate_grad_batches
    is_weighed = isinstance(module, AccumulationMixin) or has_callback(
        trainer.callbacks, "AccumulationCallback"
    )
    if number > 1 and not is_weighed:
        said = (
            f"plain Lightning: each micro-batch's loss is divided by "
            f"{number} (trainer.accumulate_grad_batches), whatever it weighs, so "
            f"unequal ones and short windows are not the big batch. Choose "
            f"--{ACCUMULATION}=PerSample or PerToken"
        )
        say(trainer, (ACCUMULATION, said))


def _refusal_in(error: BaseException) -> TrainkitError | None:
    """The TrainkitError inside an error of jsonargparse, or None.

    jsonargparse wraps the errors of constructors. Before version 4.53 only its text
    shows them, for arguments that may be `None`.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TrainkitError):
            return cause
        cause = cause.__cause__
    tried = re.search(r"^Subtypes: .*\btrainkit\.", str(error), re.MULTILINE)
    return TrainkitError(readable(str(error)).lstrip(" -")) if tried else None


# Lines of jsonargparse's messages about its own internals: an optional value is a
# union with None, and a nested option is an object.
_NOISE = re.compile(
    r"\s*(- )?(Does not validate against any|Subtypes: |Errors:|Given value type: "
    r"|Expected a <class 'NoneType'>|Given value: (NestedArg|Namespace)\()"
)


class TrainkitParser(LightningArgumentParser):
    """Lightning's parser, which answers a mistake with a message, not with pages of
    usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End with exit status 2, or raise `ArgumentError`, as jsonargparse does."""
        text = readable(message)
        hints = self._close_options(message)
        hints += [STRATEGIES] * (f'"{ACCUMULATION}' in message)
        for hint in hints:
            if hint not in text:  # a sub-command's parser has passed the error here
                text += f"\n{hint}"
        if not self.exit_on_error:
            super().error(text, ex)
        self.exit(2, f"{self.prog}: {text}\n")

    def _close_options(self, message: str) -> list[str]:
        unknown = re.search(r"[Uu]nrecognized arguments: (--[\w.]+)", message)
        if unknown is None:
            return []
        known = set(re.findall(r"--[\w.]+", self.format_usage()))
        close = difflib.get_close_matches(unknown[1], known, n=3)
        return [f"Did you mean {' or '.join(close)}?"] if close else []


def readable(message: str) -> str:
    """A message of jsonargparse's without the lines about its internals.

    >>> print(readable('''Parser key "trainer.max_epochs":
    ...   Does not validate against any of the Union subtypes
    ...   Subtypes: [<class 'int'>, <class 'NoneType'>]
    ...   Errors:
    ...     - Expected a <class 'int'>
    ...     - Expected a <class 'NoneType'>
    ...   Given value type: <class 'str'>
    ...   Given value: x'''))
    trainer.max_epochs:
        - Expected a int
      Given value: x
    """
    lines = [line for line in message.splitlines() if not _NOISE.match(line)]
    text = "\n".join(line for line in lines if line.strip())
    text = re.sub(r'Parser key "([^"]+)"', r"\1", text)
    return re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", text).replace("typing.", "")
