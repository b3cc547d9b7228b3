"""Causes in words, each with what to do about it."""

from __future__ import annotations

from typing import Any

from trainkit.lit.proof.report import Cause

STEP = "training_step"

INSIDE = 'micro_batching = MicroBatching(size=8, inside="auto")'
NO_STRATEGY = "no one strategy makes it exact; the inner cut can"
TOTAL = 'PerSample(loss_reduction="total")'

WITH_MIXIN = (
    "where it stands: in a class of (AccumulationMixin, LightningModule); or, for a "
    "module that is not yours, in Trainer(callbacks=[AccumulationCallback(...)])"
)
BY_HAND = (
    "self.accumulate(loss, batch, optimizer=...)  # of AccumulationMixin, in place of "
    "self.manual_backward(loss)"
)

WORDS: dict[str, tuple[str, ...]] = {
    # ---- random numbers --------------------------------------------------------------
    "unseen draws": (
        "randomness",
        "two steps over the same rows differ: it draws from Python's or NumPy's "
        "generator, from one of its own, or within a function, as rrelu does",
        "draw with torch, one number for each row",
    ),
    "draws": (
        "randomness",
        "it draws numbers that are not laid out by row (rows come first), or through "
        "which a gradient goes, so two windows of the same rows differ, and so does "
        "the big batch; more may be behind it",
        "draw in the data set, or for each row by itself",
    ),
    # ---- micro-batches one after another ---------------------------------------------
    "numbers": (
        "denominator",
        "the loss depends on the Trainer's accumulate_grad_batches or "
        "num_training_batches, or on batch_idx, which the big batch has otherwise",
        "return the mean loss itself: trainkit divides the window once",
    ),
    "hook": (
        "order",
        "it changes the gradient of each micro-batch, before the window's is complete",
        "move it to on_before_optimizer_step",
        "or, if it clips: Trainer(gradient_clip_val=...)",
    ),
    "state": (
        "state",
        "each micro-batch moves it, not each step{also}",
        "move the update to on_before_optimizer_step",
    ),
    "own backward": (
        "order",
        "gradients arrive beside the window's backward pass, as by a .backward() "
        "within training_step",
        "return the sum of all losses from training_step",
    ),
    "manual backward": (
        "denominator",
        "self.manual_backward weighs no micro-batch, and divides no window",
        BY_HAND,
    ),
    # ---- rows that see each other ----------------------------------------------------
    "chunks": (
        "rows",
        "chunks of rows do not give what all rows give: a row's output depends on "
        "other rows, or on how many there are",
        "name a module within it that treats rows apart, in inside=",
    ),
    "padding": (
        "padding",
        "outputs of a row change with the length that it is padded to",
        "pad all rows to one length in the collate function",
        "or mask padding in this module",
    ),
    "transfer": (
        "rows",
        f"this hook looks across the rows of a loader batch; {NO_STRATEGY}",
        INSIDE,
    ),
    "cut by chance": (
        "rows",
        "this field is as long as the batch has rows, and so is cut, but each row "
        "needs all of it",
        "micro_batching = MicroBatching(size=8, shared=['{place}'])",
    ),
    "BatchNorm": (
        "rows",
        "{layer} normalises each micro-batch by itself{more}",
        f'BatchNormGuard("exact"), and the loader yields whole windows, which are '
        f"cut: {INSIDE}",
        'or BatchNormGuard("group_norm") or BatchNormGuard("freeze"), for a net that '
        "is trained already; these change the model",
    ),
    "rows": (
        "rows",
        "{where} {layer}, a row gets another value when other rows are beside it; "
        f"{NO_STRATEGY}",
        INSIDE,
        "or let no operation mix rows",
    ),
    "loss": (
        "loss",
        "all modules treat rows apart, and the loss{after} looks across them, as "
        f"contrastive, Dice or batch-normalised losses do; {NO_STRATEGY}",
        INSIDE,
        "with accumulate_grad_batches=1 and larger loader batches",
    ),
    # ---- documents that share a row --------------------------------------------------
    "a cache": (
        "documents",
        "a document sees what stands before it in its row, since the model makes a "
        "cache, and beside one it does not look at positions",
        "model.config.use_cache = False",
        "or model(**batch, use_cache=False)",
    ),
    "content": (
        "documents",
        "a document's outputs change with the content of another in its row",
        "give this module a mask of blocks, offsets, or positions that begin anew, if "
        "it heeds them (attn_implementation=... of transformers)",
        "or one document a row: PadCollate in place of PackCollate",
    ),
    "place": (
        "documents",
        "a document's outputs change with its place in the row: positions run on",
        "number positions anew in each document: position_ids, as PackCollate makes "
        "them, and hand them to the model",
    ),
    "label": (
        "documents",
        "the label at the {end} of a document is across a bound: one document is to "
        "predict a token of another",
        "labels[{end}] = -100 for each document",
    ),
    "loss over documents": (
        "documents",
        "no output of a document depends on another, but the loss does",
        "let the loss be a mean over tokens, or over documents",
        "or let it see whole rows: MicroBatching(tokens=4096, inside='auto')",
    ),
    # ---- what the loss divides by ----------------------------------------------------
    "function": (
        "loss",
        "the loss is the {function} of a mean over {line}; no weights of "
        "micro-batches make that exact",
        "return the mean itself from training_step, with {strategy}",
    ),
    "sum": (
        "denominator",
        "the loss is a sum over rows, and {said} takes it for a mean",
        "{strategy}",
    ),
    "another": (
        "denominator",
        "the loss divides by what {line} counts, and not by {said}{also}",
        "{strategy}",
    ),
    "unknown": (
        "denominator",
        "the parts of the loss add up to the whole, but with weights that nothing in "
        "the batch counts; they are as {shares}",
        "accumulation = Weighed(), and in training_step self.weigh(n) with the number "
        "that the loss divides by",
        "for a module that is not yours: AccumulationCallback(Weighed(by=...))",
    ),
    "two": (
        "denominator",
        "the loss is made of {one} and of {other}",
        'return {{"loss": {{"one": first, "other": second}}}} from training_step',
        'accumulation = {{"one": {first}, "other": {second}}}',
        'micro_batching = MicroBatching("auto")',
    ),
    "host": (
        "host",
        "the loss adds up as a sum, or it divides by the number at {place!r}, which "
        "counts the whole batch and is not cut",
        "divide by the part's own count in place of {place!r}",
        'or, if it is meant as a sum: loss_reduction="total"',
    ),
    "precision": (
        "precision",
        "it runs in {precision} only, where rounding hides deviations below 5e-2, so "
        "nobody can say that it is exact. In float32: {why}",
        "let training_step run in float32 for the check",
    ),
}
"""By name: the kind of a cause, what was found, and the lines of its remedy."""


def cause(name: str, place: str = STEP, *more: str, **values: Any) -> Cause:
    """A cause in words.

    Args:
        name: in `WORDS`.
        place: where it is.
        *more: further lines of the remedy.
        **values: what the words leave open.
    """
    words = [each.format(place=place, **values) for each in WORDS[name]]
    return Cause(words[0], place, words[1], (*words[2:], *more))
