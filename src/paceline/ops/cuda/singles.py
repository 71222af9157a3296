"""A launch for a node that no pattern has taken."""

from __future__ import annotations

import torch

from paceline.ops import records
from paceline.ops.base import Experts
from paceline.ops.cuda import launch, launch_delta, launch_experts
from paceline.ops.cuda.emitter import Emitter, Unsupported
from paceline.ops.cuda.places import Place, Ref
from paceline.ops.recording import GATED, Code, Node

GATES = {Code.GATED_GELU: 1, Code.GATED_SILU: 2, Code.GATED_SIGMOID: 3, Code.GATED_RELU: 5}
EXPERT_GATES = GATES | {Code.GATED_CLAMPED: 4}
SINGLE = {Code.COPY: 0, Code.ADD: 1, Code.MUL: 2, Code.SCALE: 3, Code.GELU: 4, Code.SOFTCAP: 5, Code.BIAS: 6}


def single(e: Emitter, node: Node) -> None:
    """By what the operation is given, or by its code where that is nothing."""
    match node.record:
        case records.Norm() as norm:
            x, out = e.places[node.inputs[0]], e.define(node.outputs[0])
            e.emit("norms", launch.group_norm(x, out, norm), [x], [out])
        case records.Rotary() as turn:
            x, out = e.places[node.inputs[0]], e.define(node.outputs[0])
            e.out.reads_rows = True
            e.emit("rotary", launch.rotary(x, out, turn), [x], [out])
        case records.Store() as store:
            _store(e, node, store.layer)
        case records.Convolve() as convolution:
            e.out.reads_rows = True
            out = e.define(node.outputs[0])
            made = launch.convolve(out, convolution.layer, convolution.taps, convolution.bias)
            e.emit("convolution", made, [], [out])
        case records.BlockConv(base):
            e.out.reads_rows = True
            (x, mix), out = (e.places[symbol] for symbol in node.inputs), e.define(node.outputs[0])
            e.emit("block convolution", launch.block_conv(x, mix, base.float(), out), [x, mix], [out])
        case records.Attention():
            e.attend(node, e.whole(node.inputs[0]))
        case records.Embed() as embed:
            _embed(e, node, embed.scale)
        case records.Delta() as delta:
            held, out = [e.places[symbol] for symbol in node.inputs], e.define(node.outputs[0])
            e.out.reads_rows = e.out.recurs = True
            e.emit(
                "delta",
                launch_delta.delta(launch_delta.Delta(held, out, delta.layer, delta.rule)),
                held,
                [out],
            )
        case records.Route() as route:
            _route(e, node, route.experts)
        case records.ExpertMatrix() as matrix:
            _experts(e, node, matrix)
        case records.Mix() | records.TopClusters() | records.Gather():
            _picked(e, node)
        case _:
            _plain(e, node)


def _store(e: Emitter, node: Node, layer: int) -> None:
    e.out.reads_rows = True
    parts = [e.places[symbol] for symbol in node.inputs]
    if node.code is Code.KEEP:
        e.out.recurs = True
        e.emit("keep", launch_delta.keep(parts, layer), parts, [])
    else:
        e.emit("store", launch.store(parts, layer), parts, [])


def _embed(e: Emitter, node: Node, scale: float) -> None:
    table, out = e.pack(node.weights, "table"), e.define(node.outputs[0])
    if table.kind == 2:
        raise Unsupported("an embedding in int4")
    e.out.reads_rows = True
    e.emit("embed", launch.embed(table, out, scale), [], [out])


def _plain(e: Emitter, node: Node) -> None:
    """Element by element."""
    code, record = node.code, node.record
    if code in GATES:
        gate, value = (e.places[symbol] for symbol in node.inputs)
        out = e.define(node.outputs[0])
        e.emit("gate", launch.gated(gate, value, out, GATES[code]), [gate, value], [out])
    elif code in SINGLE:
        x = e.places[node.inputs[0]]
        y = e.places[node.inputs[1]] if len(node.inputs) > 1 else None
        out = e.define(node.outputs[0])
        factor = record.factor if isinstance(record, records.Factor) else 0.0
        vector = record.vector if isinstance(record, records.Bias) else None
        made = launch.single(SINGLE[code], x, y, out, factor, vector)
        e.emit(code.name.lower(), made, [x] if y is None else [x, y], [out])
    else:
        raise Unsupported("a target over several processes" if code is Code.REDUCE else code.name.lower())


def _experts(e: Emitter, node: Node, given: records.ExpertMatrix) -> None:
    route, x = e.places[node.inputs[0]], e.whole(node.inputs[1])
    act = 0 if given.gate is None else EXPERT_GATES.get(GATED[given.gate], 0)
    out = e.define(node.outputs[0])
    stack = e.pack(node.weights, "halves" if act else "plain")
    picked = launch_experts.Chosen(route, len(node.weights), given.top_k, given.columns)
    bias = given.bias
    if bias is not None and act:  # gate and value lie output by output
        bias = bias.view(len(bias), 2, -1).transpose(1, 2)
    bias = None if bias is None else bias.float().contiguous()
    e.emit("experts", launch_experts.experts(stack, picked, x, out, act, bias), [route, x], [out])


def _picked(e: Emitter, node: Node) -> None:
    """What is added up over chosen experts, or computed of chosen clusters."""
    match node.record:
        case records.Mix(top_k):
            route, x = (e.places[symbol] for symbol in node.inputs)
            out = e.define(node.outputs[0])
            e.emit("mix", launch_experts.mix(route, x, out, top_k), [route, x], [out])
        case records.TopClusters(ordering, size):
            scores = e.places[node.inputs[0]]
            chosen = e.places.define(node.outputs[0], torch.float32)
            ids = e.places.define(node.outputs[1], torch.int64)
            e.emit(
                "clusters",
                launch_experts.clusters(scores, chosen, ids, ordering, size),
                [scores],
                [chosen, ids],
            )
        case records.Gather(size, top_k):
            x, chosen = e.whole(node.inputs[0]), e.places[node.inputs[1]]
            out = e.define(node.outputs[0])
            made = launch_experts.gather(e.pack(node.weights, "rows"), x, chosen, out, size, top_k)
            e.emit("gather", made, [x, chosen], [out])


def _route(e: Emitter, node: Node, experts: Experts) -> None:
    x = e.places[node.inputs[0]]
    matrix = e.pack(node.weights, "plain")
    if experts.eps is not None:
        norm = records.Norm(1, experts.router_scale, experts.eps)
        normed = Ref(Place(x.width, matrix.dtype), 0, x.width)
        e.emit("norm", launch.norm(launch.Norm(x, None, None, normed, None, norm, None)), [x], [normed])
        x = normed
    elif experts.router_scale is not None:
        raise Unsupported("a router that scales its input without a norm")
    else:
        x = e.whole(node.inputs[0])
    scores = Ref(Place(matrix.outputs, torch.float32, matrix.splits), 0, matrix.outputs)
    e.emit("linear", launch.linear(matrix, x, scores, experts.router_bias, 0), [x], [scores])
    out = e.places.define(node.outputs[0], torch.float32)
    e.emit("route", launch_experts.route(scores, out, experts), [scores], [out])
