"""A launch for a node that no pattern has taken."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.ops.cuda import launch, launch_delta, launch_experts
from paceline.ops.cuda.emitter import Emitter, Unsupported, norm_of, number_of, vector_of, vector_or_none
from paceline.ops.cuda.places import Place, Ref
from paceline.ops.recording import Code, Node

GATES = {Code.GATED_GELU: 1, Code.GATED_SILU: 2, Code.GATED_SIGMOID: 3}
EXPERT_GATES = GATES | {Code.GATED_CLAMPED: 4}
SINGLE = {Code.COPY: 0, Code.ADD: 1, Code.MUL: 2, Code.SCALE: 3, Code.GELU: 4, Code.SOFTCAP: 5, Code.BIAS: 6}


def single(e: Emitter, node: Node) -> None:
    code = node.code
    if code is Code.EMBED:
        _embed(e, node)
    elif code in SINGLE:
        _elementwise(e, node)
    elif code in GATES:
        gate, value = (e.places[symbol] for symbol in node.inputs)
        out = e.define(node.outputs[0])
        e.emit("gate", launch.gated(gate, value, out, GATES[code]), [gate, value], [out])
    elif code is Code.NORM:
        x, out = e.places[node.inputs[0]], e.define(node.outputs[0])
        e.emit("norms", launch.group_norm(x, out, number_of(node, 0), norm_of(node)), [x], [out])
    elif code is Code.ROTARY:
        x, out = e.places[node.inputs[0]], e.define(node.outputs[0])
        e.out.reads_rows = True
        growth = (vector_of(node, 4), number_of(node, 3)) if len(node.integers) > 3 else None
        turn = launch.rotary(x, out, number_of(node, 0), vector_of(node), node.number, growth)
        e.emit("rotary", turn, [x], [out])
    elif code is Code.STORE:
        e.out.reads_rows = True
        parts = [e.places[symbol] for symbol in node.inputs]
        e.emit("store", launch.store(parts, number_of(node, 0)), parts, [])
    elif code is Code.CONVOLVE:
        e.out.reads_rows = True
        out, (taps, bias) = e.define(node.outputs[0]), map(vector_or_none, node.integers[2:])
        assert taps is not None
        e.emit("convolution", launch.convolve(out, number_of(node, 0), taps, bias), [], [out])
    elif code is Code.ATTENTION:
        e.attend(node, e.whole(node.inputs[0]))
    elif code in (Code.DELTA, Code.KEEP):
        _recur(e, node)
    else:
        _mixture(e, node)


def _embed(e: Emitter, node: Node) -> None:
    table, out = e.pack(node.weights, "table"), e.define(node.outputs[0])
    if table.kind == 2:
        raise Unsupported("an embedding in int4")
    e.out.reads_rows = True
    e.emit("embed", launch.embed(table, out, node.number), [], [out])


def _recur(e: Emitter, node: Node) -> None:
    held = [e.places[symbol] for symbol in node.inputs]
    e.out.reads_rows = e.out.recurs = True
    layer = number_of(node, 0)
    if node.code is Code.KEEP:
        e.emit("keep", launch_delta.keep(held, layer), held, [])
        return
    key_heads, heads, key_dim, value_dim, kernel = (number_of(node, i) for i in range(1, 6))
    conv, dt_bias, decay = (value for value in node.integers if isinstance(value, Tensor))
    sizes, out = (key_heads, heads, key_dim, value_dim, kernel), e.define(node.outputs[0])
    vectors, tiled = (conv, dt_bias, decay), bool(number_of(node, 9))
    spec = launch_delta.Delta(held, out, layer, sizes, vectors, tiled)
    e.emit("delta", launch_delta.delta(spec), held, [out])


def _elementwise(e: Emitter, node: Node) -> None:
    x = e.places[node.inputs[0]]
    y = e.places[node.inputs[1]] if len(node.inputs) > 1 else None
    out = e.define(node.outputs[0])
    vector = vector_of(node) if node.code is Code.BIAS else None
    made = launch.single(SINGLE[node.code], x, y, out, node.number, vector)
    e.emit(node.code.name.lower(), made, [x] if y is None else [x, y], [out])


def _mixture(e: Emitter, node: Node) -> None:
    code = node.code
    if code is Code.ROUTE:
        _route(e, node)
    elif code is Code.EXPERTS:
        route, x = e.places[node.inputs[0]], e.whole(node.inputs[1])
        act = EXPERT_GATES.get(Code(number_of(node, 2)), 0) if node.integers[2] else 0
        out = e.define(node.outputs[0])
        stack = e.pack(node.weights, "halves" if act else "plain")
        picked = launch_experts.Chosen(route, len(node.weights), number_of(node, 0), number_of(node, 1))
        bias = vector_or_none(node.integers[3])
        if bias is not None and act:  # gate and value lie output by output
            bias = bias.view(len(bias), 2, -1).transpose(1, 2)
        bias = None if bias is None else bias.float().contiguous()
        made = launch_experts.experts(stack, picked, x, out, act, bias)
        e.emit("experts", made, [route, x], [out])
    elif code is Code.MIX:
        route, x = (e.places[symbol] for symbol in node.inputs)
        out = e.define(node.outputs[0])
        e.emit("mix", launch_experts.mix(route, x, out, number_of(node, 0)), [route, x], [out])
    elif code is Code.TOP_CLUSTERS:
        scores = e.places[node.inputs[0]]
        chosen = e.places.define(node.outputs[0], torch.float32)
        ids = e.places.define(node.outputs[1], torch.int64)
        ordering = node.integers[0]
        assert isinstance(ordering, Tensor)
        made = launch_experts.clusters(scores, chosen, ids, ordering, number_of(node, 1))
        e.emit("clusters", made, [scores], [chosen, ids])
    elif code is Code.GATHER:
        x, chosen = e.whole(node.inputs[0]), e.places[node.inputs[1]]
        out = e.define(node.outputs[0])
        made = launch_experts.gather(
            e.pack(node.weights, "rows"), x, chosen, out, number_of(node, 0), number_of(node, 1)
        )
        e.emit("gather", made, [x, chosen], [out])
    else:
        raise Unsupported("a target over several processes" if code is Code.REDUCE else code.name.lower())


def _route(e: Emitter, node: Node) -> None:
    _, scale, expert_scale, renorm, bias, _, _, added, _ = node.integers
    x = e.places[node.inputs[0]]
    matrix = e.pack(node.weights, "plain")
    if node.number < 0 and scale is not None:
        raise Unsupported("a router that scales its input without a norm")
    if node.number >= 0:
        assert scale is None or isinstance(scale, Tensor)
        normed = Ref(Place(x.width, matrix.dtype), 0, x.width)
        made = launch.norm(launch.Norm(x, None, None, normed, None, (scale, node.number), None))
        e.emit("norm", made, [x], [normed])
        x = normed
    else:
        x = e.whole(node.inputs[0])
    scores = Ref(Place(matrix.outputs, torch.float32, matrix.splits), 0, matrix.outputs)
    e.emit("linear", launch.linear(matrix, x, scores, vector_or_none(added), 0), [x], [scores])
    out = e.places.define(node.outputs[0], torch.float32)
    spec = launch_experts.Router(
        scores,
        out,
        number_of(node, 0),
        bool(renorm),
        vector_or_none(expert_scale),
        vector_or_none(bias),
        number_of(node, 5),
        number_of(node, 6),
        bool(number_of(node, 8)),
    )
    e.emit("route", launch_experts.route(spec), [scores], [out])
