"""What an inner cut takes, refuses and says, and what to do."""

from __future__ import annotations

import random
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.core.inside.common import CLASSES, WIDTH, Net, batch, nt_xent
from tests.lit.inside.common import Foreign, Own, data, fit
from tests.zoo.modules import by_hand, hooked
from trainkit import AccumulationCallback, MicroBatching, TrainkitError, check

AUTO, NAMED, SELF = (
    MicroBatching(size=4, inside=inside) for inside in ("auto", "net", "self")
)


def of_all_rows(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """Its loss needs all rows of the batch."""
    return self(batch[0]).view(2, 11, 5).diff(dim=0).square().mean()


def of_two_loaders(self: Any, batch: Any, batch_idx: int) -> Any:
    return sum(nt_xent(self(x), labels) for x, labels in batch.values())


def of_lists(self: Any, batch: Any, batch_idx: int) -> Tensor:
    return nt_xent(self(torch.stack([x for x, _ in batch])), batch)


def two_loaders() -> Any:
    return CombinedLoader({"a": data(), "b": data(33, 11)}, "min_size")


def lists() -> Any:
    return DataLoader(TensorDataset(*batch(66)), batch_size=22, collate_fn=list)


class Moving(Foreign):
    """Takes a number from what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [*range(1, 13)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.held.pop()


def test_what_a_module_holds_is_not_moved() -> None:
    """Its copy is."""
    found, other = Moving(), Moving()
    fit(found, AUTO)
    fit(other)
    assert found.logged == pytest.approx(other.logged, rel=1e-12)


def leaves(net: Any, x: Tensor) -> Tensor:
    """Leaves a tensor that the step reads."""
    out = net.body(x)
    net.largest = out.detach().abs().amax(1)
    return net.head(out)


class Reading(Foreign):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + len(self.net.largest)


def test_a_module_that_leaves_tensors_is_not_taken(capsys: Any) -> None:
    module, plain = Reading(net=Net(leaves)), Reading(net=Net(leaves))
    fit(module, AUTO)
    assert 'found by inside="auto": net.body, net.head' in capsys.readouterr().out
    fit(plain)
    assert int(module.logged[0] - 0.5) == int(plain.logged[0] - 0.5)


def test_warnings_while_it_looks_are_not_for_the_user() -> None:
    def warns(net: Any, x: Tensor) -> Tensor:
        if len(x) < 6:
            warnings.warn("only few rows", stacklevel=2)
        return net.plain(x)

    def heard(options: MicroBatching) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            fit(Foreign(net=Net(warns)), options, proof="off")
        return [str(w.message) for w in found if "few rows" in str(w.message)]

    assert not heard(MicroBatching(size=22, inside="auto"))
    assert heard(NAMED)


class Logging(Foreign):
    """Logs in its own forward."""

    def __init__(self, log: str = "log") -> None:
        super().__init__()
        self.how = log

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.how == "log":
            self.log("norm", out.norm())
        elif self.how == "log_dict":
            self.log_dict({"norm": out.norm()})
        return out


@pytest.mark.parametrize(
    ("proof", "how"), [("warn", "log"), ("off", "log_dict"), ("require", "log")]
)
def test_logging_within_a_cut_is_refused(proof: Any, how: str) -> None:
    words = f"self.{how} within self, which runs in chunks .* log it in training_step"
    module = Logging(how)
    with pytest.raises(TrainkitError, match=words):
        fit(module, SELF, proof=proof)
    assert "log" not in vars(module)
    with pytest.raises(TrainkitError, match=words):
        check(module, batch(), micro_batches=SELF)


def test_a_log_of_the_instance_is_its_own_again() -> None:
    logged: list[str] = []

    def log(name: str, *_: Any) -> None:
        logged.append(name)

    module = Logging("none")
    vars(module)["log"] = log
    fit(module, SELF)
    assert vars(module)["log"] is log
    assert len(logged) >= 6
    module.how = "log"
    with pytest.raises(TrainkitError, match=r"self\.log within self"):
        fit(module, SELF)
    assert vars(module)["log"] is log


def test_logging_outside_of_a_cut_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    """And "auto" goes around what logs."""
    run = fit(Logging(), NAMED)
    assert {"norm", "loss"} <= set(run.callback_metrics)
    run = fit(Logging("none"), SELF)
    assert "loss" in run.callback_metrics
    capsys.readouterr()
    fit(Logging(), AUTO)
    assert 'found by inside="auto": net\n' in capsys.readouterr().out


@pytest.mark.parametrize("has_mixin", [False, True])
def test_no_strategy_is_refused_with_the_inner_cut_as_a_way(has_mixin: bool) -> None:
    words = r"received None\. .*PerSample\(\) .*compares rows .*size=8, inside='net'"
    module = Own() if has_mixin else Foreign()
    with pytest.raises(TrainkitError, match=words):
        fit(module, None, *[AccumulationCallback()][has_mixin:])
    fit(module, MicroBatching(size=8, inside="net"))


def test_why_the_proof_is_not_measured_is_a_sentence(capsys: Any) -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        if len(batch[0]) < 8:
            raise ValueError(f"{'few rows ' * 40}. And more.")
        return Foreign.training_step(self, batch, batch_idx)

    fit(hooked(Foreign, training_step=step)(), NAMED)
    line = next(x for x in capsys.readouterr().out.splitlines() if "not meas" in x)
    assert line.endswith(("few rows ...", "few ...")), line
    assert len(line) < 300


# ---- what is said was measured -------------------------------------------------------


def draws(net: Any, x: Tensor) -> Tensor:
    """Noise drawn by row, as in a variational encoder."""
    out = net.plain(x)
    return out + 0.3 * torch.randn_like(out)


def counts(net: Any, x: Tensor) -> Tensor:
    """Counts its rows, which a few rows do not show, since it draws as well."""
    return net.plain(x) * (1 + len(x) / 50) + 1e-12 * random.random()


def mixes(net: Any, x: Tensor) -> Tensor:
    """Rows that see each other."""
    out = net.plain(x)
    return out - out.mean(0)


def mean_of_squares(out: Tensor, labels: Tensor) -> Tensor:
    return out.square().mean()


def leaves_largest(self: Any, x: Tensor) -> Tensor:
    """Leaves a tensor in the only module that there is."""
    self.largest = x.abs().amax(1)
    return F.linear(x, self.weight)


def compares(self: Any, batch: Any, batch_idx: int) -> Tensor:
    return (self.net(batch[0]) @ batch[0].T).square().mean() * self.scale.mean()


def step(training_step: Any, **how: Any) -> Any:
    return hooked(Foreign, training_step=training_step)(**how)


def within(inside: Any, **how: Any) -> MicroBatching:
    return MicroBatching(size=4, inside=inside, **how)


TWICE, SQUARES = Foreign(), Foreign(mean_of_squares, net=Net(counts))
TWICE.again = TWICE.net
LEAVES = hooked(nn.Linear, forward=leaves_largest)(WIDTH, CLASSES)
NORMED = nn.Sequential(Net(), nn.BatchNorm1d(CLASSES))
TWO_NAMES = within("net", tokens=9, lengths=("a", "b"))
TWO, PAIRS = {"loader": two_loaders()}, {"loader": lists()}
SEVERAL, REQUIRED = {"accumulate": 2}, {"proof": "require"}
FEW, NAME = '^MicroBatching inside="auto": .*few rows of', "Name .*: inside='net'.$"
ROWS_MUST = 'inside="auto": no submodule of Foreign can run .* net: it is a BatchNorm'
REFUSED: list[Any] = [  # the module, its cut, how it is trained, and why not
    (step(of_all_rows), AUTO, {}, f"{FEW} .*that failed: Runtime.*2, 11.*{NAME}"),
    (step(of_two_loaders), AUTO, TWO, rf"{FEW} dict\(a: .*failed: .*{NAME}"),
    (step(of_lists), AUTO, PAIRS, rf"{FEW} list\(tuple\(.*failed: .*{NAME}"),
    (step(compares, net=nn.BatchNorm1d(WIDTH)), AUTO, {}, ROWS_MUST),
    (Foreign(net=LEAVES), AUTO, {}, "net: its forward leaves values in"),
    (Foreign(), NAMED, SEVERAL, "needs no strategy where one loader"),
    (Own(), NAMED, SEVERAL, "needs no strategy where one loader"),
    (Foreign(), within("encoder"), {}, "'encoder'. It has net"),
    (TWICE, within(("net", "again")), {}, "^again: it runs in chunks already"),
    (Foreign(), TWO_NAMES, {}, r"with inside= .* one argument .* \('a', 'b'\)"),
    (Foreign(net=Net(mixes)), NAMED, {}, "^net: .*output of a row depends on other r"),
    (Foreign(net=NORMED), NAMED, {}, "^net: .*BatchNorm"),
    (SQUARES, NAMED, REQUIRED, "proof=.require.: .* not the big batch"),
]


@pytest.mark.parametrize(("module", "cut", "how", "words"), REFUSED)
def test_what_cannot_be_cut_is_refused_and_what_to_name_is_said(
    module: Any, cut: Any, how: dict[str, Any], words: str
) -> None:
    with pytest.raises(TrainkitError, match=words):
        fit(module, cut, **how)
    if words.endswith(NAME):
        fit(module, NAMED, **how)


def test_a_fit_says_exact_where_it_was_measured(capsys: Any) -> None:
    """Of noise within chunks nobody knows whose rows have it."""
    fit(Foreign(net=Net(dropout=0.5), calls=2), NAMED)
    assert "proof: exact on 7 of your rows" in capsys.readouterr().out
    fit(Foreign(net=Net(draws), calls=2), NAMED)
    text = capsys.readouterr().out
    assert "proof: not measured: it draws numbers" in text
    assert "(randn_like at inside/test_verdicts.py:" in text


@pytest.mark.parametrize(
    ("net", "loss", "cut"),
    [
        (Net(), nt_xent, NAMED),
        (Net(), nt_xent, AUTO),
        (Net(counts), mean_of_squares, NAMED),
    ],
)
def test_a_module_that_steps_by_itself_is_proved_as_it_is_cut(
    net: nn.Module, loss: Any, cut: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its loss is no mean over rows, so parts that step alone would be off."""
    is_off = loss is mean_of_squares
    warns = pytest.warns(UserWarning, match="Chunks of rows do not give")
    with warns if is_off else nullcontext():
        fit(by_hand(Foreign)(loss, net=net), cut)
    assert ("proof: exact on 7 of your rows" in capsys.readouterr().out) is not is_off


def test_auto_goes_around_what_mixes_rows() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Net())
    assert check(Foreign(net=net), batch(), micro_batches=AUTO).exact


@pytest.mark.parametrize(("net", "exact"), [(Net(), True), (Net(counts), False)])
def test_check_follows_the_cut(net: nn.Module, exact: bool) -> None:
    report = check(Foreign(mean_of_squares, net=net), batch(), micro_batches=NAMED)
    assert report.exact == exact
    if not exact:
        assert [cause.place for cause in report.causes] == ["net"]
        with pytest.raises(AssertionError, match="chunks of rows do not give"):
            report.assert_exact()


def test_the_remedy_of_a_loss_across_rows_works_as_printed() -> None:
    report = check(Foreign(), batch())
    assert not report.exact
    line = report.causes[0].remedy[0]
    assert line.startswith("micro_batching = ")
    said = line.removeprefix("micro_batching = ")
    options = eval(said, {"MicroBatching": MicroBatching})
    assert check(Foreign(), batch(), micro_batches=options).exact


def test_a_submodule_that_is_not_called_is_named() -> None:
    class Around(Foreign):
        """Calls another method of the net."""

        def forward(self, x: Any) -> Tensor:
            x = torch.stack(x) if isinstance(x, list) else x
            return self.net.head(self.net.body(x))

    def listed(rows: list[Any]) -> Any:
        return [x for x, _ in rows], torch.stack([label for _, label in rows])

    untold = DataLoader(data().dataset, batch_sampler=[[*range(22)]], collate_fn=listed)
    for loader in (data(), untold):
        with pytest.warns(UserWarning, match="net ran whole. .* calls it with 0. Only"):
            fit(Around(), NAMED, loader=loader)


def unlike(rows: list[Any]) -> Any:
    """A list of tensors of unlike lengths, as of images."""
    x, labels = zip(*rows, strict=True)
    return [each.repeat(1 + n % 3, 1) for n, each in enumerate(x)], torch.stack(labels)


@pytest.mark.parametrize("collate", [None, unlike])
def test_a_submodule_that_gets_a_list_of_samples_is_said_to_run_whole(
    collate: Any,
) -> None:
    def lists(net: Any, x: Any) -> Tensor:
        return net.plain(torch.stack([each[0] for each in x]))

    class Lists(Foreign):
        def forward(self, x: Any) -> Tensor:
            return self.net([each.view(-1, each.shape[-1]) for each in x])

    loader = DataLoader(data().dataset, batch_size=22, collate_fn=collate)
    with pytest.warns(UserWarning, match="net ran whole. .* loader batch of 22 rows"):
        fit(Lists(net=Net(lists)), NAMED, loader=loader)
