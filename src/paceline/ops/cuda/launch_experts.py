"""Launches of mixtures of experts, and of heads that score a few clusters of tokens. As launch.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from paceline.ops.base import Experts
from paceline.ops.cuda.context import Context, Launch
from paceline.ops.cuda.kernels import experts as mixing
from paceline.ops.cuda.launch import ELEMENTS, TYPES, by_card, parts_of, power, start
from paceline.ops.cuda.places import Ref
from paceline.ops.cuda.weights import INT8, TILE, Matrix


def route(scores: Ref, out: Ref, experts: Experts) -> Launch:
    """The experts of each row, and their shares."""
    bias, scale, count = experts.choice_bias, experts.expert_scale, scores.width

    def run(context: Context) -> None:
        start(mixing.route_kernel, (context.bucket.rows,))(
            scores.data, scores.data if bias is None else bias,
            scores.data if scale is None else scale, out.data, count, scores.split_stride,
            scores.stride, out.stride, experts.kept_groups, SPLITS=parts_of(scores, context),
            SIGMOID=bias is not None and not experts.softmax, BIASED=bias is not None, RENORM=experts.renormalize,
            SCALE=scale is not None, TOP=experts.top_k,
            GROUPS=1 if experts.kept_groups == experts.groups else experts.groups,
            E=power(count), num_warps=1 if count <= 256 else 4,
        )  # fmt: skip

    return run


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which experts rows go through: `count` in all, `top` of them for a row, by `route`; `per_row`: columns of the input
    that belong to a rank, 0 if all ranks read the same."""

    route: Ref
    count: int
    top: int
    per_row: int


def experts(stack: Matrix, chosen: Chosen, x: Ref, out: Ref, act: int, bias: Tensor | None = None) -> Launch:
    """out[row, rank] of the expert chosen there. `stack`: all experts' matrices behind each other, `bias` as well."""
    count, route, top, per_row = chosen.count, chosen.route, chosen.top, chosen.per_row
    outputs = stack.outputs // count

    def run(context: Context) -> None:
        rows = context.bucket.rows
        pairs, listed = rows * top, rows > 16
        lists, counts = route.data, route.data
        if listed:
            lists = context.scratch("listed", count * pairs).view(torch.int32)
            counts = context.scratch("counts", count).view(torch.int32)
            start(mixing.list_kernel, (count,))(
                route.data, lists, counts, pairs, route.stride, pairs, TOP=top, B=1024
            )
        bm = 64 if listed and rows >= 256 else 16
        wide = stack.dtype != torch.float32
        bk = stack.block or (128 if wide else 32)
        start(mixing.experts_kernel, (count if listed else pairs, triton.cdiv(outputs, TILE)))(
            x.data, route.data, lists, counts, stack.data, stack.data if stack.scale is None else stack.scale,
            x.data if bias is None else bias, out.data, outputs, stack.inputs, per_row, x.stride, route.stride,
            out.stride, pairs, LISTED=listed, KIND=stack.kind, ASM=by_card(stack), EVEN=stack.inputs % bk == 0, ACT=act,
            BIAS=bias is not None, TOP=top, DT=TYPES[stack.dtype], BN=TILE, BM=bm, BK=bk, num_warps=4,
            num_stages=3 if wide else 2,
        )  # fmt: skip

    return run


def mix(route: Ref, x: Ref, out: Ref, top: int) -> Launch:
    def run(context: Context) -> None:
        start(mixing.mix_kernel, (context.bucket.rows, triton.cdiv(out.width, ELEMENTS)))(
            route.data, x.data, out.data, out.width, route.stride, x.stride, out.stride, TOP=top, B=ELEMENTS
        )  # fmt: skip

    return run


def clusters(scores: Ref, chosen: Ref, ids: Ref, ordering: Tensor, size: int) -> Launch:
    def run(context: Context) -> None:
        start(mixing.clusters_kernel, (context.bucket.rows,))(
            scores.data, ordering, chosen.data, ids.data, scores.width, size, scores.split_stride, scores.stride,
            chosen.stride,
            ids.stride, SPLITS=parts_of(scores, context), TOP=chosen.width, SIZE=power(size), C=power(scores.width),
        )  # fmt: skip

    return run


def gather(head: Matrix, x: Ref, chosen: Ref, out: Ref, size: int, top: int) -> Launch:
    def run(context: Context) -> None:
        start(mixing.gather_kernel, (context.bucket.rows, top))(
            x.data, chosen.data, head.data, head.data if head.scale is None else head.scale, out.data, size,
            head.inputs, x.stride,
            chosen.stride, out.stride, INT8=head.kind == INT8, DT=TYPES[head.dtype], SIZE=power(size), BK=64,
        )  # fmt: skip

    return run
