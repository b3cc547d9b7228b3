"""Several ranks train what one process with the big batch trains, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy

from tests.helpers import (
    NAIVE,
    TOLERANCE,
    RankError,
    TokenModule,
    deviation,
    pad,
    ragged_sequences,
    raise_rank_errors,
    rank_loader,
    run_cases,
    run_ranks,
    train_on_windows,
    trainer,
    windows_over_ranks,
)
from tests.lit.front.test_manual import big_batch_gan
from tests.lit.windows.rank_cases import (
    BATCH,
    DATA,
    GRID,
    LATER,
    SHARDED,
    THREE,
    TWO,
    WINDOW,
    Announced,
    TwoHeads,
    deviations,
    silenced,
    train,
    train_stream,
)
from tests.zoo.modules import Gan, Plain, Stream, on_front
from trainkit import WindowMonitor

EXACT = TOLERANCE[torch.float64]
STARTS = range(0, len(DATA) // 2, BATCH)


@pytest.fixture(scope="module")
def two() -> dict[Any, list[Any]]:
    """What two ranks end with in each case."""
    return run_cases(2, TWO)


@pytest.fixture(scope="module")
def three() -> dict[Any, list[Any]]:
    """What three ranks end with in each case."""
    return run_cases(3, THREE)


@pytest.mark.parametrize(("front", "optimizer", "clip"), GRID)
def test_two_ranks_equal_one_process(
    two: Any, front: str, optimizer: str, clip: float | None
) -> None:
    """transformers#34242, torchtune#2172: the mean of rank means is not the mean."""
    off = deviations(two[front, optimizer, clip], optimizer=optimizer, clip=clip)
    assert max(off) <= EXACT


@pytest.mark.parametrize(
    ("world", "case", "keep"),
    [
        (3, "mixin", None),
        (3, "callback", None),
        (2, "plain", None),
        (3, "plain", None),
        (2, "plain fsdp2", None),
        # transformers#37110: a loss of one's own, averaged once more by DDP.
        (2, "sum", None),
        # torchtitan divides by its local count; miles#2796 clamps it on each rank.
        (2, 0, 0),
        (2, 1, 1),
        (3, 2, 2),
    ],
)
def test_ranks_equal_one_process(
    two: Any, three: Any, world: int, case: Any, keep: int | None
) -> None:
    """Of two or three; but plain Lightning does not. One rank alone may weigh."""
    data = DATA if keep is None else silenced(world, keep)
    off = deviations({2: two, 3: three}[world][case], data)
    assert min(off) > NAIVE if "plain" in str(case) else max(off) <= EXACT


def test_tensor_parallel_ranks_equal_one_process(two: Any) -> None:
    """verl#6609: two ranks share one window's data, and count it once. World size
    means data-parallel replicas: of four ranks, two."""
    assert max(deviations(two["tensor parallel"], replicas=1)) <= EXACT
    four = run_ranks(train, 4, "callback", {**SHARDED, "split": 2})
    assert max(deviations(four, replicas=2)) <= EXACT


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="FSDP1 needs a GPU")
def test_fsdp1_equals_one_process() -> None:
    reference, start = TokenModule(), TokenModule()
    data = ragged_sequences(38)
    train_on_windows(reference, windows_over_ranks(data, BATCH, WINDOW, 1))
    module, (windows,) = on_front("callback", Plain, dtype=torch.float32)
    how: dict[str, Any] = {"strategy": FSDPStrategy(state_dict_type="full")}
    how |= {"accelerator": "gpu", "callbacks": [windows, WindowMonitor(1)]}
    fitted = trainer(WINDOW, **how)
    fitted.fit(module, rank_loader(data, BATCH, 0, 1))
    state = fitted.strategy.lightning_module_state_dict()
    trained = torch.cat([p.double().flatten().cpu() for p in state.values()])
    assert deviation(trained, reference, start) <= TOLERANCE[torch.float32]
    assert windows.last_window is not None


def test_parameters_unused_in_some_micro_batches_equal_one_process(two: Any) -> None:
    """The first head is used in a window's first micro-batch alone, whose gradient
    the ranks do not exchange before the last one, which does not use it."""
    start, reference = TwoHeads(), TwoHeads()
    optimizer = reference.configure_optimizers()
    shares = [DATA[rank::2] for rank in range(2)]
    joint = [pad(shares[0][i : i + BATCH] + shares[1][i : i + BATCH]) for i in STARTS]
    for window in [joint[i : i + WINDOW] for i in range(0, len(joint), WINDOW)] * 2:
        optimizer.zero_grad()
        counts = [(batch["labels"] != -100).sum() for batch in window]
        for index, (batch, count) in enumerate(zip(window, counts, strict=True)):
            (reference.training_step(batch, index) * count / sum(counts)).backward()
        optimizer.step()
    ends = raise_rank_errors(two["two heads"])
    assert max(deviation(end, reference, start) for end in ends) <= EXACT
    gans = raise_rank_errors(two["gan"])
    expected = big_batch_gan(joint)
    assert max(deviation(end, expected, Gan()) for end in gans) <= EXACT


@pytest.mark.parametrize(("how", "exchanges"), [("by hand", 10), ("apart", 6)])
def test_windows_of_ones_own_equal_one_process(
    two: Any, how: str, exchanges: int
) -> None:
    """Ranks kept apart exchange gradients once a window: five batches and three windows
    in each epoch."""
    ends, numbers = zip(*raise_rank_errors(two[how]), strict=True)
    assert max(deviations(list(ends), optimizer="adamw")) <= EXACT
    assert numbers == (exchanges, exchanges)


def test_a_rank_may_begin_without_a_micro_batch_of_its_own(two: Any) -> None:
    """The other would wait for it, to agree on what weights are divided by first."""
    assert max(deviations(two["later"], LATER, "adamw")) <= EXACT


def test_table_is_printed_on_the_first_rank_alone(two: Any) -> None:
    first, second = raise_rank_errors(two["printed"])
    assert second == ""
    *table, proof = first.splitlines()
    # In parts of 3, 2 and 2: of 36 rows, a rank has 18, so its last batch has 2.
    assert proof.startswith("trainkit | proof: exact on 7 of your rows")
    assert table == [
        "trainkit | step: per-device batch 4 x accumulation 2 x ranks 2 = 16 samples a "
        "step, weighed by PerToken",
        "trainkit | windows: 2 full windows + 1 short one (1 of 2 micro-batches) "
        "an epoch",
    ]


STATIC = "static_graph=True: DDP cannot run a window of several micro-batches"


@pytest.mark.parametrize(
    ("world", "case", "text"),
    [
        (2, "static graph, 2", f"{STATIC}.*received 2. Make the DDP module, or Lightn"),
        (2, "half auto", r"the first of shape \[.*, are not averaged by DDP or FSDP2"),
        (2, "no sync", "was accumulated under no_sync"),
        (2, "lists", r"the same number of batches, and they have \[3, 5\]"),
        (3, "lists", r"the same number of batches, and they have \[5, 3, 5\]"),
    ],
)
def test_what_ranks_cannot_train_is_refused(
    two: Any, three: Any, world: int, case: str, text: str
) -> None:
    for result in {2: two, 3: three}[world][case]:
        with pytest.raises(RankError, match=text):
            raise_rank_errors([result])


def test_what_refusals_advise_trains(two: Any) -> None:
    """By the mean, parameters that no backend averages differ, which is why."""
    assert not torch.equal(*raise_rank_errors(two["half mean"]))
    assert torch.equal(*raise_rank_errors(two["static graph, 1"]))
    assert two["equal streams"] == [6, 6]
    assert two["cut streams"] == [4, 4]


@pytest.mark.parametrize(
    ("kind", "numbers"), [(Stream, [6, 3]), (Stream, [0, 3]), (Announced, [4, 6])]
)
def test_stream_that_ends_early_on_one_rank_is_refused(
    numbers: list[int], kind: type[Stream]
) -> None:
    """lightning#20404, pytorch#33148: the other ranks waited for ever."""
    ends = run_ranks(train_stream, 2, numbers, kind)
    short = numbers.index(min(numbers))
    text = f"rank {short} has run out of batches after {min(numbers)}, and other ranks"
    assert text in str(ends[short])
    assert isinstance(ends[1 - short], RankError)
