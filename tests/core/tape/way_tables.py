"""The ways of a forward that are right, refused, or drawn again."""

from __future__ import annotations

import math
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.core.tape.ways import (
    FOREIGN,
    GLOBAL,
    ONE,
    Calling,
    Case,
    Drops,
    Layer,
    Norming,
    Through,
    after,
    by_a_teacher,
    cached,
    filled,
    hook,
    in_half,
    more_outputs,
    normed_backward,
    on_shape,
    other_shape,
    over_a_layer,
    overwriting,
    put,
    reading,
    refused,
    rewritten,
    rows,
    scaled,
    spectrum,
    straight_through,
    summing,
    turn_on,
    twice_as,
    view_written,
    with_lora,
    with_norms,
    with_parametrized_layer,
    with_tied_weights,
    with_weight_norm,
    without_gradients,
    written,
)
from tests.zoo.conv_nets import conv_bn, pooled

RIGHT: dict[str, Case] = {
    # operations
    "mask": Case(lambda net, x: x.masked_fill(x > 0, 0.5)),
    "put": Case(lambda net, x: x.clone().index_put_((x > 0,), torch.tensor(0.5).to(x))),
    "foreign": Case(lambda net, x: x * FOREIGN),
    "turned": Case(lambda net, x: (x.transpose(0, 1) * 2).transpose(0, 1)),
    "layer_norm": Case(lambda net, x: F.layer_norm(x, x.shape[1:])),
    "own_mean": Case(
        lambda net, x: x + x.mean((1, 2, 3), True) / (x > 0).sum((1, 2, 3), True)
    ),
    "gather": Case(lambda net, x: x.gather(1, x.argsort(1))),
    "one_hot": Case(lambda net, x: x * F.one_hot(x.argmax(1), 4).movedim(3, 1)),
    "unfold": Case(lambda net, x: F.fold(F.unfold(x, 3, padding=1), 8, 3, padding=1)),
    "resized": Case(lambda net, x: F.interpolate(F.max_pool2d(x, 2), size=x.shape[2:])),
    "copy": Case(lambda net, x: torch.empty_like(x).copy_(x)),
    "out": Case(twice_as),
    "written": Case(written),
    "view_written": Case(view_written),
    "rewritten": Case(rewritten, is_whole=True),
    "zeros": Case(
        lambda net, x: torch.cat([x[:, 1:], x.new_zeros(rows(x), 1, 8, 8)], 1)
    ),
    "expand": Case(lambda net, x: x + net.token.expand(rows(x), -1, -1, -1)),
    "repeat": Case(lambda net, x: x + net.token.repeat(rows(x), 1, 1, 1)),
    "flat_rows": Case(lambda net, x: x.view(-1, 8).tanh().view(rows(x), 4, 8, 8)),
    "two_views": Case(
        lambda net, x: torch.add(*net.one[1](torch.cat([x, x.flip(2)])).chunk(2))
    ),
    "einsum": Case(lambda net, x: torch.einsum("bchw,cd->bdhw", x, net.weight)),
    "on_shape": Case(on_shape),
    "requires_grad": Case(lambda net, x: x.sin() if x.requires_grad else x),
    "to": Case(lambda net, x: x * net.token.to(x) + x.new_ones(4, 1, 1)),
    "complex": Case(spectrum),
    "functional": Case(lambda net, x: F.batch_norm(x, None, None, training=True)),
    "layer_in_front": Case(
        lambda net, x: net.fc(pooled(net.two(net.one(x - x.mean(1, keepdim=True))))),
        is_whole=True,
    ),
    # gradients and modes
    "no_grad": Case(without_gradients),
    "teacher": Case(by_a_teacher, lambda: {"teacher": conv_bn(4, 4, nn.Tanh())}),
    "decorated": Case(lambda net, x: x * scaled(net, x)),
    # Half precision within is not the big batch's.
    "autocast": Case(in_half, limit=1e-3),
    "function": Case(lambda net, x: Through.apply(x)),
    "detached": Case(lambda net, x: x * x.detach().mean(1, keepdim=True) + x.data),
    "nested_gradients": Case(lambda net, x: x * torch.func.grad(torch.sin)(ONE)),
    "mode": Case(lambda net, x: x.sin() if torch.is_grad_enabled() else x),
    # what is drawn once
    "python": Case(lambda net, x: x * 3 if random.random() < 0.5 else x.sin()),
    "numpy": Case(lambda net, x: x * float(np.random.rand())),
    "fixed": Case(lambda net, x: x * torch.rand(1, 4, 1, 1)),
    "own_generator": Case(
        lambda net, x: x * (torch.rand(1, 4, 1, 1, generator=net.generator) + 0.5),
        lambda: {"generator": None},
    ),
    "weight_noise": Case(
        lambda net, x: F.conv2d(
            x, F.dropout(net.two[0].weight, 0.5) + torch.rand(4, 4, 3, 3), padding=1
        )
    ),
    # state
    "own_weight": Case(
        lambda net, x: x * net.scale + net.shift + torch.arange(4).view(1, 4, 1, 1),
        lambda: {
            "scale": nn.Parameter(torch.rand(1, 4, 1, 1) + 0.5),
            "shift": torch.rand(1, 4, 1, 1),
        },
    ),
    "counting": Case(
        after(lambda net, x: net.calls.add_(1)), lambda: {"calls": torch.zeros(())}
    ),
    "average_of_weights": Case(
        after(lambda net, x: net.mean.add_(net.weight.detach().mean())),
        lambda: {"mean": torch.zeros(())},
    ),
    "all_weights": Case(
        lambda net, x: x * sum(p.square().sum() for p in net.parameters())
    ),
    "by_a_part": Case(lambda net, x: x * torch.ones(4, 1, 1).add_(1)),
    # layers
    "own_forward": Case(adapt=lambda net: net.one.__setitem__(1, Layer(4))),
    "lora": Case(adapt=with_lora),
    "weight_norm": Case(adapt=with_weight_norm),
    "parametrized": Case(adapt=with_parametrized_layer),
    "tied": Case(adapt=with_tied_weights),
    # Most of it does not see other rows.
    "other_norms": Case(lambda net, x: net.part(x), adapt=with_norms, apart=0.0),
    # what changes between two batches: each call is written down anew
    "function_replaced": Case(
        lambda net, x: net.act(x * 2), lambda: {"act": torch.sin}, put(act=torch.cos)
    ),
    "buffer_filled": Case(
        lambda net, x: x * (2 - net.buffer),
        lambda: {"buffer": ONE.clone()},
        lambda net: net.buffer.fill_(0.2),
    ),
    "buffer_asked": Case(
        lambda net, x: x.sin() if net.buffer < 0.7 else x,
        lambda: {"buffer": ONE.clone()},
        lambda net: net.buffer.fill_(0.2),
    ),
    "float_at_first": Case(
        lambda net, x: x @ net.buffer,
        lambda: {"buffer": torch.eye(8)},
        lambda net: net.float(),
        limit=1e-5,
    ),
    "table_later": Case(cached, lambda: {"table": None}, turn_on),
    "writes_later": Case(overwriting, change=turn_on),
    "hook_of_layer": Case(change=hook("one.1")),
}

REFUSED: dict[str, Case] = {
    # rows that see each other
    "softmax": refused("see each other", lambda net, x: x.softmax(0)),
    "flip": refused("see each other", lambda net, x: x + x.flip(0)),
    "cumsum": refused("see each other", lambda net, x: x.cumsum(0)),
    "sort": refused("see each other", lambda net, x: x.sort(0)[0]),
    "gram": refused(
        "see each other", lambda net, x: x * (x.flatten(1) @ x.flatten(1).T).mean()
    ),
    "into_statistics": refused(
        "see each other", after(lambda net, x: net.one[1](x.cumsum(0)))
    ),
    "mean": refused("mean .* one value of all rows", lambda net, x: x - x.mean(0)),
    "norm": refused("one value of all rows", lambda net, x: x / x.norm()),
    "largest": refused("one value of all rows", lambda net, x: x / x.amax()),
    "first": refused("one value of all rows", lambda net, x: x - x[:1]),
    "einsum": refused(
        "all rows", lambda net, x: x + torch.einsum("bchw,bchw->chw", x, x)
    ),
    "normed_backward": refused("see each other", normed_backward),
    "straight_through": refused("see each other", straight_through),
    "reading": refused("Python reads values", reading),
    "native": refused(
        "only functional.batch_norm",
        lambda net, x: torch.native_batch_norm(
            x, None, None, None, None, True, 0.1, 1e-5
        )[0],
    ),
    "batch_norm": refused(
        "only functional.batch_norm",
        lambda net, x: torch.batch_norm(
            x, None, None, None, None, True, 0.1, 1e-5, False
        ),
    ),
    "instance_norm": refused(
        "instance_norm .* in place",
        lambda net, x: F.instance_norm(x, net.mean, net.var, use_input_stats=True),
        own=lambda: {"mean": torch.zeros(4), "var": torch.ones(4)},
    ),
    "normed_columns": refused(
        "batch_norm .* has no rows, or channels",
        lambda net, x: F.batch_norm(x.transpose(0, 1), None, None, training=True),
    ),
    "normed_sum": refused(
        "batch_norm .* has no rows, or channels",
        lambda net, x: F.batch_norm(x.sum(0, True), None, None, training=True),
    ),
    "normed_weight": refused(
        "batch_norm .* has no rows, or channels",
        lambda net, x: F.batch_norm(
            net.token, None, None, x.mean((0, 2, 3)), training=True
        ),
    ),
    "weights_of_batch": refused(
        "batch_norm .* its weights depend on the batch",
        lambda net, x: F.batch_norm(x, None, None, x.mean((0, 2, 3)), training=True),
    ),
    "normed_within": refused(
        "batch_norm .* in an autograd.Function", lambda net, x: Norming.apply(x)
    ),
    "other_shape": refused("off by inf", other_shape, is_whole=True),
    "more_outputs": refused("off by inf", more_outputs, is_whole=True),
    # numbers of rows
    "by_rows": refused("number of rows", lambda net, x: x / rows(x)),
    "by_a_share": refused("number of rows", lambda net, x: x * (1.0 / rows(x))),
    "times_len": refused(r"__len__ .* x\.shape\[0\]", lambda net, x: x * len(x)),
    "times_numel": refused("number of rows", lambda net, x: x * x.numel()),
    "root": refused("number of rows", lambda net, x: x * math.sqrt(rows(x))),
    "int": refused("number of rows", lambda net, x: x * int(rows(x))),
    "if_many": refused("number of rows", lambda net, x: x * 2 if rows(x) > 5 else x),
    "places": refused(
        "arange.* not NumberOfRows",
        lambda net, x: x + torch.arange(rows(x)).view(-1, 1, 1, 1),
    ),
    "shuffled": refused(
        "randperm .* gets the number of rows",
        lambda net, x: x[torch.randperm(rows(x))],
    ),
    "tensor_of_rows": refused("tensor", lambda net, x: x * torch.tensor(rows(x))),
    "parts": refused("for 3 rows", lambda net, x: torch.cat([x[:1] * 2, x[1:]])),
    "unbind": refused("more tensors", lambda net, x: torch.stack(x.unbind(0))),
    "bool_index": refused("for 3 rows", lambda net, x: x * x[x > 0].sum()),
    "offset": refused(
        "storage_offset .* it is 512 for one chunk and 256 for another",
        lambda net, x: x * x[-1].storage_offset(),
    ),
    # values
    "item": refused("item", lambda net, x: x * x.mean().item()),
    "numpy": refused("numpy", lambda net, x: x * x.detach().numpy().mean()),
    "float": refused("__float__", lambda net, x: x * float(x.max())),
    "text": refused("__format__", lambda net, x: x * len(f"{x}")),
    "if": refused(r"__bool__ .* torch\.where", lambda net, x: x if x.sum() > 0 else -x),
    "equal": refused("equal", lambda net, x: x if torch.equal(x, x) else -x),
    # gradients
    "data": refused(r"data\.__set__", after(lambda net, x: setattr(x, "data", x.data))),
    "inner_gradient": refused(
        "grad on", lambda net, x: torch.autograd.grad(x.sum(), x)[0]
    ),
    "hook": refused(
        "register_hook", after(lambda net, x: x.register_hook(lambda g: 2 * g))
    ),
    "given_away": refused(
        "gets a function or a module",
        lambda net, x: Calling.apply(net.body, x),
        own=lambda: {"body": nn.Tanh()},
    ),
    "vmap": refused("Python reads values", lambda net, x: torch.vmap(torch.sin)(x)),
    "generator": refused(
        "generator=",
        lambda net, x: x * torch.rand(x.shape, generator=torch.Generator()),
    ),
    # what stays behind
    "global": refused("something outside", after(lambda net, x: GLOBAL.update(kept=x))),
    "left": refused("aux keeps", after(lambda net, x: setattr(net, "aux", x.square()))),
    "left_mean": refused(
        "aux keeps", after(lambda net, x: setattr(net, "aux", x.mean()))
    ),
    "left_in_buffer": refused(
        "mean keeps",
        after(lambda net, x: setattr(net, "mean", x.mean(1))),
        own=lambda: {"mean": torch.zeros(())},
    ),
    "left_in_list": refused(
        "something outside",
        after(lambda net, x: net.seen.append(x * 2)),
        own=lambda: {"seen": []},
    ),
    "average": refused(
        "tensor of all",
        after(lambda net, x: net.mean.add_(x.mean())),
        own=lambda: {"mean": torch.zeros(())},
    ),
    "sum_in_place": refused("tensor of all chunks", summing),
    "view_in_place": refused("tensor of all chunks", filled),
    "argument_in_place": refused(
        "writes into an argument",
        lambda net, x: net.fc(pooled(net.one(x.mul_(2)))),
        is_whole=True,
    ),
    "within_a_transform": refused(
        "mul_ .* in place that others need",
        lambda net, x: x * torch.func.grad(lambda s: (s * x).mul_(2).sum())(ONE),
    ),
    "over_a_layer": refused("view from before", over_a_layer),
    "counted_in_use": refused(
        "see each other",
        lambda net, x: x * net.calls + net.calls.add_(1),
        own=lambda: {"calls": torch.ones(())},
    ),
    # later
    "keeps_later": refused(
        "kept keeps",
        after(lambda net, x: setattr(net, "kept", x if GLOBAL["is_on"] else None)),
        change=turn_on,
    ),
    "backward_hook": refused(
        "two has backward hooks", lambda net, x: x, change=hook("two", "backward")
    ),
    "backward_hook_of_leaf": refused(
        r"two\.0 has backward hooks", lambda net, x: x, change=hook("two.0", "backward")
    ),
}

DRAWN: dict[str, Case] = {
    "noise": Case(lambda net, x: x + torch.randn_like(x) * 0.3 + F.dropout(x, 0.4)),
    "dropout_in_front": Case(
        lambda net, x: net.fc(pooled(net.two(net.one(F.dropout(x, 0.3))))),
        is_whole=True,
    ),
    "drops": Case(lambda net, x: net.part(x), lambda: {"part": Drops()}),
    "checkpoint": Case(
        lambda net, x: checkpoint(net.part, x, use_reentrant=False),
        lambda: {"part": nn.Sequential(nn.Conv2d(4, 4, 1), nn.Dropout(0.3), nn.Tanh())},
    ),
}
"""What draws for each row."""
