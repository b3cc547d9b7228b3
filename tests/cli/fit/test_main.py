"""`trainkit fit` and its like: what is found, what is said, how it ends."""

from __future__ import annotations

import functools
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from tests.cli.fit.lightning_user import USER, Net, make, quiet, written
from tests.helpers import weights
from trainkit import TrainkitError
from trainkit.cli.errors import TrainingFailed
from trainkit.cli.fit.main import RedactedConfig, _refuse_absent, main
from trainkit.cli.main import main as command

pytestmark = pytest.mark.usefixtures("for_lightnings_cli")


def test_the_command_finds_modules_in_the_current_folder(tmp_path: Path) -> None:
    written(
        tmp_path / "my_net.py",
        f"from {USER} import Data, Net\nclass MyNet(Net):\n    fits = []\n"
        "    def on_train_end(self):\n        self.fits.append(1)\n"
        "class MyData(Data):\n    pass\n",
    )
    args = ["--model=my_net.MyNet", "--data=my_net.MyData", "--model.lr=1e-4"]
    assert main(["fit", *args, *quiet(), "--accumulation=PerToken"]) == 0
    import my_net  # type: ignore[import-not-found]

    assert my_net.MyNet.fits == [1]
    assert main(["validate", *args, *quiet()]) == 0


def test_no_configuration_in_the_folder_is_written_over(tmp_path: Path) -> None:
    """There is no logger here that would number the folders."""
    written(tmp_path / "config.yaml", "trainer: {log_every_n_steps: 7}\n")
    command = [MODEL, f"--data={USER}.Data", *quiet(max_epochs=1)]
    assert main(["fit", "--config=config.yaml", *command]) == 0
    assert main(["validate", *command]) == 0
    assert main(["fit", *command, "--trainer.log_every_n_steps=3"]) == 0
    kept = {
        path.name: yaml.safe_load(path.read_text())["trainer"]["log_every_n_steps"]
        for path in tmp_path.glob("config*")
    }
    assert kept == {"config-v1.yaml": 7, "config-v2.yaml": 3, "config.yaml": 7}


@pytest.mark.parametrize(
    "ckpt_path", [None, "last", "best", "hpc", "registry", "registry:a/b", "s3://a/b"]
)
def test_what_lightning_finds_by_itself_is_left_to_it(ckpt_path: str | None) -> None:
    _refuse_absent(ckpt_path)
    for other in ("best.ckpt", "lastly", "a/last"):
        with pytest.raises(TrainkitError, match="which does not exist"):
            _refuse_absent(other)


def test_help_is_no_mistake(capsys: Any) -> None:
    assert main(["fit", "--accumulation.help=PerToken"]) == 0
    assert "--accumulation.ignore_index" in capsys.readouterr().out


MODEL = f"--model={USER}.Net"


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["fit"], r"required: fit.model"),
        (["fit", "--model=Nope"], r"model:(.|\n)*Nope"),
        (["fit", f"--model={USER}.Nope"], r"no attribute 'Nope'"),
        (
            ["fit", MODEL, "--trainer.callbacks+=trainkit.Nope"],
            r"(?s)\A(?!.*describes its arguments).*No trainkit attribute Nope",
        ),
        (["fit", MODEL, "--accumulation=Nope"], "one of .*PerSample, PerToken, .*Un"),
        (["fit", MODEL, "--accumulation=nope.yaml"], r"nope\.yaml either not access"),
        (
            ["fit", MODEL, "--accumulation=PerToken", "--accumulation.nope=1"],
            r"'nope' is not accepted",
        ),
        (
            ["fit", MODEL, "--accumulation=PerToken", "--accumulation.ignore_index=x"],
            r"ignore_index:\n\s+Expected a int. Got value: x",
        ),
        (["fit", MODEL, "--batchnorm.policy=bad"], r"Literal\['warn', 'error', .* bad"),
        (["fit", MODEL, "--lr_scaling=linear"], r"lr_scaling:(.|\n)*linear"),
        (
            ["fit", MODEL, "--lr_scaling.reference_batch=-1"],
            r"^LRScaling reference_batch: must be a positive number, received -1\.0",
        ),
        (["fit", MODEL, "--acumulation=PerToken"], r"Did you mean --accumulation\?"),
        (["fit", MODEL, "--trainer.max_epochs=x"], r"Expected a int\n.*value: x"),
        (["fit", MODEL, "--config=nope.yaml"], "File does not exist: .*nope.yaml"),
        (["test", MODEL, "--ckpt_path=no.ckpt"], "received 'no.ckpt', which does not"),
        (["fitt"], "invalid choice: 'fitt' .choose from 'fit', 'validate'"),
    ],
)
def test_a_mistake_is_one_readable_message(args: list[str], text: str) -> None:
    with pytest.raises(TrainkitError, match=text) as caught:
        main(args)
    for noise in ("usage:", "Union", "NoneType", "NestedArg", "<class", "RAW"):
        assert noise not in str(caught.value)


@pytest.mark.parametrize(
    ("yaml_text", "text"),
    [
        ("a: [", "Problems parsing config: while parsing a flow node"),
        ("nope: 3", "does not accept option 'nope'"),
        ("trainer: {max_epochs: '${data.n}'}", "Interpolation key 'data.n' not found"),
        ("accumulation: {_target_: trainkit.PerToken}", "one of PerSample, PerToken"),
    ],
)
def test_a_mistake_in_a_file_is_one_message_too(
    yaml_text: str, text: str, tmp_path: Path, capsys: Any
) -> None:
    file = written(tmp_path / "config.yaml", yaml_text)
    assert command(["fit", MODEL, f"--config={file}"]) == 2
    said = capsys.readouterr().err
    assert text in said
    assert said.count("trainkit: ") == 1


def test_a_script_ends_with_one_message_and_status_two(capsys: Any) -> None:
    with pytest.raises(SystemExit) as end:
        make("--accumulation=Nope")
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "PerToken" in said
    assert "usage" not in said


@pytest.mark.parametrize(
    ("first", "raised", "expected"),
    [
        (0, ZeroDivisionError, ZeroDivisionError),
        (0, SystemExit, SystemExit),  # with a text, which is left to Python
        # a loss of NaN, say: before the first step a mistake, later a failed training
        (0, TrainkitError, TrainkitError),
        (0, MisconfigurationException, MisconfigurationException),
        (5, TrainkitError, TrainingFailed),
        (5, MisconfigurationException, TrainingFailed),
    ],
)
def test_an_error_of_the_training_comes_through(
    first: int,
    raised: type[BaseException],
    expected: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = Net.training_step

    def breaks(self: Any, batch: Any, batch_idx: int) -> Any:
        if batch_idx >= first:
            raise raised("it is broken")
        return real(self, batch, batch_idx)

    monkeypatch.setattr(Net, "training_step", breaks)
    command = ["fit", MODEL, f"--data={USER}.Data", *quiet()]
    with pytest.raises(expected, match="it is broken"):
        main([*command, "--trainer.accumulate_grad_batches=2"])


def stopped_at(monkeypatch: Any, num_batches: int, *numbers: int) -> None:
    """Let signals come in the `num_batches`-th training step from now on."""
    real, seen = Net.training_step, []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        seen.append(1)
        if len(seen) == num_batches:
            for number in numbers:
                signal.raise_signal(number)
        return real(self, batch, batch_idx)

    monkeypatch.setattr(Net, "training_step", training_step)


def fit(*args: str, **options: Any) -> int:
    options = {"enable_checkpointing": True, **options}
    data = f"--data={USER}.ResumableData"
    return main(["fit", MODEL, data, *quiet(**options), *args])


def ends_of_fits(monkeypatch: Any) -> list[tuple[int, Tensor]]:
    """The steps and the weights of each fit that is not stopped from now on."""
    ends: list[tuple[int, Tensor]] = []
    monkeypatch.setattr(
        Net, "on_fit_end", lambda self: ends.append((self.global_step, weights(self)))
    )
    return ends


@functools.cache
def unbroken() -> tuple[int, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        ends = ends_of_fits(patch)
        assert fit("--accumulation=PerToken", enable_checkpointing=False) == 0
    (end,) = ends
    return end


@pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning")
@pytest.mark.parametrize(
    ("num_batches", "number", "status"),
    [(5, signal.SIGTERM, 143), (11, signal.SIGINT, 130)],
)
def test_an_interrupted_training_goes_on_as_if_it_had_not_been(
    num_batches: int, number: int, status: int, monkeypatch: Any, capsys: Any
) -> None:
    steps, whole = unbroken()
    capsys.readouterr()
    ends = ends_of_fits(monkeypatch)
    stopped_at(monkeypatch, num_batches, number)
    assert fit("--accumulation=PerToken") == status
    last = Path("checkpoints/last.ckpt").absolute()
    said = capsys.readouterr().out
    _, _, line = said.partition("to resume: ")
    assert line.startswith(f"cd {Path.cwd()} && ")
    assert f"trainkit fit {MODEL} --data=" in line
    assert line.endswith(f" --accumulation=PerToken --ckpt_path={last}\n")
    assert ends == []
    assert fit("--accumulation=PerToken", f"--ckpt_path={last}") == 0
    ((resumed_steps, resumed),) = ends
    assert torch.load(last, weights_only=True)["global_step"] < steps == resumed_steps
    assert torch.equal(resumed, whole)


@pytest.mark.parametrize("is_own", [False, True])
def test_the_checkpoint_of_a_stop_is_beside_lightnings_own_or_the_users(
    is_own: bool, monkeypatch: Any, capsys: Any
) -> None:
    stopped_at(monkeypatch, 5, signal.SIGTERM)
    own = ["--trainer.callbacks+=trainkit.ExactResume"]
    own += ["--trainer.callbacks.dirpath=mine"]
    own += ["--trainer.callbacks.every_n_train_steps=null"]
    own += ["--trainer.callbacks.warns=false"]
    assert fit(*own * is_own) == 143
    assert "--ckpt_path=" in capsys.readouterr().out
    found = {str(path) for path in Path().rglob("*.ckpt")}  # there was no end of one
    assert found == {"mine/last.ckpt" if is_own else "checkpoints/last.ckpt"}


@pytest.mark.usefixtures("own_ctrl_c")
@pytest.mark.parametrize(
    ("numbers", "checkpointing"),
    [((signal.SIGINT, signal.SIGINT), "true"), ((signal.SIGINT,), "false")],
)
def test_an_end_without_a_checkpoint_says_so(
    numbers: tuple[int, ...], checkpointing: str, monkeypatch: Any, capsys: Any
) -> None:
    stopped_at(monkeypatch, 5, *numbers)
    assert fit(enable_checkpointing=checkpointing) == 130
    assert "stopped by SIGINT; nothing was saved" in capsys.readouterr().out
    assert not list(Path().rglob("*.ckpt"))


@pytest.mark.usefixtures("own_ctrl_c")
def test_a_checkpoint_from_before_a_second_ctrl_c_is_named(
    monkeypatch: Any, capsys: Any
) -> None:
    stopped_at(monkeypatch, 11, signal.SIGINT, signal.SIGINT)  # in the second epoch
    assert fit() == 130
    (saved,) = Path().absolute().rglob("*.ckpt")
    said = capsys.readouterr().out
    assert said.endswith(f"| stopped by SIGINT; saved earlier: {saved}\n")


def test_an_interrupted_validation_has_nothing_to_save(
    monkeypatch: Any, capsys: Any
) -> None:
    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Net, "validation_step", validation_step)
    assert main(["validate", MODEL, f"--data={USER}.Data", *quiet()]) == 143
    assert capsys.readouterr().out.endswith("trainkit | stopped by SIGTERM\n")


def test_secrets_are_not_in_the_configuration_of_a_run(
    monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setenv("MY_API_KEY", "sk-0123456789")
    secret = "trainer: {default_root_dir: '${oc.env:MY_API_KEY}'}\n"
    written(tmp_path / "c.yaml", secret)
    assert main(["fit", "--config=c.yaml", MODEL, f"--data={USER}.Data", *quiet()]) == 0
    (config,) = tmp_path.rglob("config.yaml")
    assert "sk-0123456789" not in config.read_text()
    assert "<redacted>" in config.read_text()


class SavedElsewhere(RedactedConfig):
    def save_config(self, trainer: Any, pl_module: Any, stage: Any) -> None:
        pass


@pytest.mark.parametrize("is_first", [True, False])
def test_only_what_this_rank_has_saved_is_redacted(
    is_first: bool, tmp_path: Path
) -> None:
    """Another rank may find the file while it is being written."""
    saved = tmp_path / "config.yaml"
    told = SimpleNamespace(broadcast=lambda _: is_first or saved.write_text("a: ["))
    is_zero: Any = {"is_global_zero": is_first}
    trainer: Any = SimpleNamespace(log_dir=str(tmp_path), strategy=told, **is_zero)
    module: Any = None
    config = SavedElsewhere(module, module, save_to_log_dir=False)
    config.setup(trainer, module, "fit")
    assert saved.exists() != is_first
