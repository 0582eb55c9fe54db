"""Whether a model computes the same when some of its parameters are split over tensor axes, found out before a rank starts.

The model runs once whole and once as one tensor rank would run it, with parameters of one scalar each as in `probe`; see `tensor_trace` for how the
second run is held against the first. A backward over what was written down then shows which gradients are parts. This catches what fails on a rank
(heads that cannot be divided, sizes that the code counts on), what is silently wrong (a fused projection that is cut in the wrong places, a norm over
features of which a rank has some), and gradients that must be summed over the tensor ranks although their parameter is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from attrs import define, evolve, field
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from pdsl.grammar.errors import ModelError
from pdsl.lowering.factory import describe_error, on_path, resolve
from pdsl.lowering.facts import SINGLE_INPUT, LayerKind, ModelFacts
from pdsl.lowering.places import MeshAxis
from pdsl.lowering.plan import ParameterLayout
from pdsl.lowering.probe import give_memory, skeleton, take_rows, taken_entries
from pdsl.lowering.probe_pass import is_plain_sequential, loss_of, parameter_groups
from pdsl.lowering.probe_placed import Placement, axes_of, split_placement, whole
from pdsl.lowering.probe_saved import SavedBytes
from pdsl.lowering.probe_tensor_flow import flow_back
from pdsl.lowering.probe_tensor_trace import PartRun, ProblemFound, WholeRun
from pdsl.lowering.styles import ModuleStyle, is_sequence, module_style, sequence_of, split_axes, split_modules
from pdsl.lowering.tensor_facts import SEQUENCE, SplitInput, TensorFacts, TensorProblem

__all__ = ["tensor_probe"]

_ROWS = 2


def tensor_probe(
    factory: str | Callable[..., nn.Module],
    arguments: Mapping[str, object],
    *,
    batch: Mapping[str, Tensor] | Tensor,
    facts: ModelFacts,
    layouts: Sequence[ParameterLayout],
    axes: Sequence[MeshAxis],
    objective: str = "model",
    validates: bool = False,
    directory: str = ".",
) -> TensorFacts:
    """What layouts do to the model that `factory(**arguments)` makes. `axes` are the tensor axes, major first; `batch` is as for `probe`, `objective`
    what the loss comes from as a spec names it; with `validates` the model has to compute the same in eval mode too.

    Raises ModelError if the model cannot be built, or cannot be run even whole.
    """
    name = factory if isinstance(factory, str) else f"{factory.__module__}:{factory.__qualname__}"
    with on_path(directory), torch.random.fork_rng(devices=[]):
        make = resolve(factory, directory) if isinstance(factory, str) else factory

        def run(*, train: bool) -> TensorFacts:
            probed = _Probed(facts, {layout.name: layout for layout in layouts}, tuple(axes), objective)
            first, second = (skeleton(make, arguments, name).train(train) for _ in range(2))
            given = taken_entries(first, batch)
            assert given is not None
            try:
                return probed.run_part(second, probed.run_whole(first, given, name))
            except ProblemFound as found:
                problem = found.problem if train else evolve(found.problem, text=f"in validation, {found.problem.text}")
                return TensorFacts(problems=(problem,), sequence=probed.sequence)

        trained = run(train=True)
        if trained.problems or not validates:
            return trained
        held = run(train=False)
        if held.problems or held.exchanges == trained.exchanges:
            return evolve(trained, problems=held.problems)
        text = "in validation, the model gathers or splits its stream elsewhere than in training"
        return TensorFacts(problems=(TensorProblem("differs", "", text),), sequence=trained.sequence)


@define(eq=False)
class _Probed:
    """Both runs of one model. The first fills `whole`, the second `part` and the fields after it."""

    facts: ModelFacts
    layouts: dict[str, ParameterLayout]
    axes: tuple[MeshAxis, ...]
    objective: str
    whole: WholeRun = field(factory=WholeRun)
    part: PartRun = field(init=False)
    gathers: dict[str, tuple[int, ...]] = field(factory=dict)
    scatters: list[str] = field(factory=list)
    shares: list[str] = field(factory=list)
    enters: list[SplitInput] = field(factory=list)
    exits: list[tuple[int, int]] = field(factory=list)
    inputs: list[SplitInput] = field(factory=list)
    biases: list[tuple[str, tuple[str, ...]]] = field(factory=list)
    _exchanged: set[object] = field(factory=set)
    saved_whole: SavedBytes = field(init=False)

    @property
    def sequence(self) -> tuple[str, ...]:
        return sequence_of(self.layouts.values(), self.axes)

    @property
    def _parts(self) -> int:
        return prod(a.size for a in self.axes if a.name in self.sequence)

    # --- the two runs -------------------------------------------------------------------------------------------------------------------

    def run_whole(self, model: nn.Module, batch: Mapping[str, Tensor] | Tensor, name: str) -> dict[str, Tensor]:
        """Run the model of a name whole; the entries that it was given. Raises ModelError, or ProblemFound if a module cannot be split."""
        rows = {n: take_rows(t, _ROWS) for n, t in (batch.items() if isinstance(batch, Mapping) else ((SINGLE_INPUT, batch),))}
        give_memory(model)
        self._prepare(model, self.whole, None)
        self.saved_whole = SavedBytes(self.facts, self.whole, model, rows)
        with self.whole, self.saved_whole:
            try:
                self._call(model, rows)
            except Exception as error:
                raise ModelError(f"{name}: the forward pass failed: {describe_error(error)}") from error
        self._model = model
        return rows

    _model: nn.Module = field(init=False)

    def run_part(self, model: nn.Module, rows: dict[str, Tensor]) -> TensorFacts:
        """Run the model as a tensor rank. Raises ProblemFound."""
        self.part = PartRun(self.whole.events, self.axes)
        sizes = {a.name: a.size for a in self.axes}
        placements = {name: self._placement(name) for name in self.layouts}
        give_memory(model, parts={n: [prod(sizes[a] for a in split) for split in p] for n, p in placements.items()})
        twins = dict(self._model.named_parameters(remove_duplicate=False))
        names = {}
        for canonical, group in parameter_groups(model).items():
            for alias, parameter in group:
                self.part.start(parameter, twins[alias], placements[canonical])
                names[id(parameter)] = canonical
        for (_, mine), (_, theirs) in zip(model.named_buffers(), self._model.named_buffers(), strict=True):
            self.part.start(mine, theirs, whole(mine.dim()))
        for tensor in rows.values():
            self.part.start(tensor, tensor, whole(tensor.dim()))
        self._prepare(model, self.part, self.part)
        saved = SavedBytes(self.facts, self.part, model, rows)
        with self.part, saved:
            try:
                output = self._call(model, rows)
            except Exception as error:
                text = f"the model's code fails on a tensor rank: {describe_error(error)}"
                raise ProblemFound(TensorProblem("fails", self.part.at[-1], text)) from error
        loss = loss_of(output)
        ends = [loss] if loss is not None else [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        for tensor in ends:
            placement = self.part.placement(tensor)
            scores = loss is None and self.objective == "cross_entropy" and placement and placement[-1]
            if scores and placement == split_placement(tensor.dim(), -1, scores):
                self.part.note_loss(tensor, -1, tensor[..., 0].numel())
                continue
            if placement is None or axes_of(placement):
                over = ", ".join(sorted(axes_of(placement or ())))
                raise self.part.problem(
                    "layout", f"what the model returns lies split over {over}: its last module must give whole tensors", [tensor]
                )
        partial = flow_back(self.part, ends, names)
        self._check_sequence(partial)
        return TensorFacts(
            partial=tuple(sorted((*partial.items(), *self.biases))),
            sequence=self.sequence,
            enters=tuple(self.enters),
            exits=tuple(self.exits),
            gathers=tuple(self.gathers.items()),
            scatters=tuple(dict.fromkeys(self.scatters)),
            shares=tuple(dict.fromkeys(self.shares)),
            inputs=tuple(self.inputs),
            losses=tuple(evolve(found, targets=found.targets // _ROWS) for found in self.part.losses),
            saved=tuple(zip(saved.bytes, self.saved_whole.bytes, strict=True)),
        )

    def _placement(self, name: str) -> Placement:
        by_dim = dict(self.layouts[name].splits)
        return tuple(split_axes(by_dim[d], self.axes) if d in by_dim else () for d in range(len(self.facts.parameter(name).shape)))

    def _call(self, model: nn.Module, rows: dict[str, Tensor]) -> Any:
        if is_plain_sequential(model) or tuple(rows) == (SINGLE_INPUT,):
            return model(next(iter(rows.values())))
        return model(**rows)

    def _check_sequence(self, partial: Mapping[str, tuple[str, ...]]) -> None:
        for name, layout in self.layouts.items():
            p = self.facts.parameter(name)
            if is_sequence(layout) and p.layers and name not in partial:
                text = f"{name} is said to work on a part of the sequence, and is given whole sequences"
                raise ProblemFound(TensorProblem("sequence", name.rpartition(".")[0], text, name))

    # --- what runs as one event -----------------------------------------------------------------------------------------------------------

    def _prepare(self, model: nn.Module, run: WholeRun, part: PartRun | None) -> None:
        for path, module in model.named_modules():
            if path:
                module.register_forward_pre_hook(lambda *_, path=path: run.at.append(path))
                module.register_forward_hook(lambda *_: run.at.pop() and None)
        aliases = {n: p.name for p in self.facts.parameters for n in (p.name, *p.aliases)}
        for alias, name in aliases.items():
            layout, (path, _, leaf) = self.layouts[name], alias.rpartition(".")
            if not layout.splits or leaf == "bias":
                continue
            module = model.get_submodule(path)
            _check_module(module, path, name)
            style = module_style(layout, self.axes, embedding=isinstance(module, nn.Embedding))
            module.__dict__["forward"] = (
                _whole_forward(module, path, run) if part is None else self._part_forward(module, path, name, style, part)
            )
        if self.sequence:
            self._prepare_stream(model, run, part)

    def _part_forward(self, module: nn.Module, path: str, name: str, style: ModuleStyle, part: PartRun) -> Callable[[Tensor], Tensor]:
        sizes = {a.name: a.size for a in self.axes}
        stream = self.sequence
        in_stream = self._in_stream(path)

        def forward(input: Tensor) -> Tensor:  # noqa: A002  as in torch
            with part.muted():
                placed = part.placement(input)
                gathers = (
                    bool(stream) and input.dim() > 1 and placed == split_placement(input.dim(), SEQUENCE, stream) and style.takes_whole
                )
                self._check_input(placed, style, path, name, input, gathers=gathers)
                x = torch.cat([input] * self._parts, SEQUENCE) if gathers else input
                y = _computed(module, x, style, sizes)
                scatters = bool(stream) and in_stream and bool(style.inputs) and not style.takes_whole
                placement = whole(y.dim()) if style.gives_whole else split_placement(y.dim(), -1, style.outputs)
                if scatters:
                    y, placement = self._narrowed(part, y, path), split_placement(y.dim(), SEQUENCE, stream)
                    self.scatters.append(path)
                    self.biases += [(f"{path}.bias", stream)] if getattr(module, "bias", None) is not None else []
                self.gathers |= {path: (0,)} if gathers else {}
                part.note_module(path, [input], [y], [placement])
                given = (id(input), style.outputs, style.inputs if style.takes_whole else ())
                self.shares += [path] if given in self._exchanged else []
                self._exchanged.add(given)
                part.sources[id(y)] = name
            return y

        return forward

    def _check_input(self, placed: Placement | None, style: ModuleStyle, path: str, name: str, given: Tensor, *, gathers: bool) -> None:
        if placed is None:
            raise ProblemFound(TensorProblem("layout", path, f"{path} is given a tensor of which is not known where it came from"))
        wanted = whole(given.dim()) if style.takes_whole else split_placement(given.dim(), -1, style.inputs)
        if placed != wanted and not gathers:
            lies = "whole" if not axes_of(placed) else f"split over {', '.join(sorted(axes_of(placed)))} in dim {_first(placed)}"
            takes = "whole ones" if style.takes_whole else f"those whose last dim is split over {', '.join(style.inputs)}"
            raise ProblemFound(TensorProblem("layout", path, f"{path} takes {takes}, and is given a tensor that lies {lies}", name))

    def _narrowed(self, part: PartRun, tensor: Tensor, where: str) -> Tensor:
        """A part of a stream. Raises ProblemFound if its sequence cannot be divided."""
        dims = tensor.dim()
        length = tensor.shape[SEQUENCE] if dims > 1 else 0
        if length % self._parts or dims < 3:
            over = ", ".join(self.sequence)
            text = (
                f"a sequence of {length} is split over {over} = {self._parts}: {length} % {self._parts} = {length % self._parts}"
                if dims > 2
                else f"a stream of {dims} dims has no sequence: expected (rows, sequence, features)"
            )
            raise ProblemFound(TensorProblem("sequence", where, text))
        return tensor.narrow(SEQUENCE, 0, length // self._parts)

    # --- the stream between the layers ----------------------------------------------------------------------------------------------------

    @property
    def _blocks(self) -> list[int]:
        return [i for i, layer in enumerate(self.facts.layers) if layer.kind is LayerKind.BLOCK and layer.name != "(model)"]

    @property
    def _extends(self) -> bool:
        """Whether the stream stays split after the last block, since a module there works on a part of it."""
        after = range(self._blocks[-1] + 1, len(self.facts.layers)) if self._blocks else ()
        return any(is_sequence(self.layouts[p]) for i in after for p in self.facts.layers[i].parameters)

    def _in_stream(self, path: str) -> bool:
        inside = [self.facts.layers[i].name for i in self._blocks]
        after = (
            [m for i in range(self._blocks[-1] + 1, len(self.facts.layers)) for m in self.facts.layers[i].modules] if self._blocks else []
        )
        return any(path.startswith(f"{m}.") for m in inside) or (
            self._extends and any(path == m or path.startswith(f"{m}.") for m in after)
        )

    def _prepare_stream(self, model: nn.Module, run: WholeRun, part: PartRun | None) -> None:
        if not self._blocks:
            raise ProblemFound(
                TensorProblem("sequence", "", "the model has no chain of blocks, so there is no stream between them to split")
            )
        for index in self._blocks:
            layer = self.facts.layers[index]

            def before(_: nn.Module, args: Any, kwargs: Any, index: int = index) -> Any:
                with run.muted():
                    leaves, spec = tree_flatten((args, kwargs))
                    self._cross(index, leaves, part)
                    if index == self._blocks[0]:
                        leaves = self._enter(index, leaves, run, part)
                    return tree_unflatten(leaves, spec)

            model.get_submodule(layer.name).register_forward_pre_hook(before, with_kwargs=True)
        for path in self._wholes():
            self._prepare_whole(model.get_submodule(path), path, run, part)
        last = self._blocks[-1]

        def after(_: nn.Module, args: Any, output: Any) -> Any:
            with run.muted():
                leaves, spec = tree_flatten(output)
                leaves = leaves if self._extends else [self._exit(i, t, run, part) for i, t in enumerate(leaves)]
                self._cross(last + 1, leaves, part)
                return tree_unflatten(leaves, spec)

        model.get_submodule(self.facts.layers[last].name).register_forward_hook(after)

    def _wholes(self) -> list[str]:
        """Modules between a block and its split projections: attention and the like, which look at the length of what they are given."""
        blocks = {self.facts.layers[i].name for i in self._blocks}
        parents = dict.fromkeys(path.rpartition(".")[0] for path in split_modules(self.facts.parameters, self.layouts.values()))
        inside = [n for n in parents if n not in blocks and any(n.startswith(f"{b}.") for b in blocks)]
        return [
            n for n in inside if not any(is_sequence(self.layouts[p.name]) and p.name.startswith(f"{n}.") for p in self.facts.parameters)
        ]

    def _prepare_whole(self, module: nn.Module, path: str, run: WholeRun, part: PartRun | None) -> None:
        """Give a module the whole sequence where the stream lies split."""

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            with run.muted():
                leaves, spec = tree_flatten((args, kwargs))
                for i, tensor in enumerate(leaves):
                    if not isinstance(tensor, Tensor) or not tensor.requires_grad or tensor.dim() < 2:
                        continue
                    placed = part.placement(tensor) if part is not None else None
                    split = placed == split_placement(tensor.dim(), SEQUENCE, self.sequence)
                    leaves[i] = torch.cat([tensor] * self._parts, SEQUENCE) if split else tensor.clone()
                    if split:
                        self.gathers[path] = (*self.gathers.get(path, ()), i)
                        self._exchanged.add((id(leaves[i]), self.sequence, ()))
                    run.note_module(
                        f"(input of {path})", [tensor], [leaves[i]], [whole(tensor.dim()) if split or placed is None else placed]
                    )
                return tree_unflatten(leaves, spec)

        module.register_forward_pre_hook(before, with_kwargs=True)

    def _cross(self, layer: int, leaves: list[Any], part: PartRun | None) -> None:
        """Note which of the tensors that cross into a layer lie split."""
        if part is None or layer >= len(self.facts.layers):
            return
        for index, boundary in enumerate(self.facts.layers[layer].inputs):
            tensor = leaves[boundary.leaf]
            placed = part.placement(tensor) or ()
            if placed == split_placement(tensor.dim(), SEQUENCE, self.sequence):
                self.inputs.append(SplitInput(layer, index, tensor.dim() + SEQUENCE, self.sequence))
            elif axes_of(placed):
                raise part.problem("layout", f"a tensor that crosses into {self.facts.layers[layer].name} lies split", [tensor])

    def _enter(self, layer: int, leaves: list[Any], run: WholeRun, part: PartRun | None) -> list[Any]:
        made = list(leaves)
        for index, boundary in enumerate(self.facts.layers[layer].inputs):
            tensor = leaves[boundary.leaf]
            if not boundary.differentiable or tensor.dim() < 2:
                continue
            if part is None:
                new = tensor.clone()
            else:
                new = self._narrowed(part, tensor, self.facts.layers[layer].name).clone()
                self.enters.append(SplitInput(layer, index, tensor.dim() + SEQUENCE, self.sequence))
            made[boundary.leaf] = new
            run.note_module("(enter)", [tensor], [new], [split_placement(tensor.dim(), SEQUENCE, self.sequence)])
        return made

    def _exit(self, index: int, tensor: Any, run: WholeRun, part: PartRun | None) -> Any:
        if not isinstance(tensor, Tensor) or not tensor.requires_grad:
            return tensor
        placed = part.placement(tensor) if part is not None else None
        split = placed is not None and tensor.dim() > 1 and placed == split_placement(tensor.dim(), SEQUENCE, self.sequence)
        new = torch.cat([tensor] * self._parts, SEQUENCE) if split else tensor.clone()
        if split:
            self.exits.append((index, tensor.dim() + SEQUENCE))
        run.note_module("(exit)", [tensor], [new], [whole(tensor.dim()) if split or placed is None else placed])
        return new


# --- modules ----------------------------------------------------------------------------------------------------------------------------


def _check_module(module: nn.Module, path: str, name: str) -> None:
    if type(module) not in (nn.Linear, nn.Embedding):
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        raise ProblemFound(TensorProblem("module", "", f"{path} is a {kind}: only torch's own Linear and Embedding can be split", name))
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq or module.sparse):
        option = "max_norm" if module.max_norm is not None else "scale_grad_by_freq" if module.scale_grad_by_freq else "sparse"
        raise ProblemFound(TensorProblem("module", "", f"{path} is an Embedding with {option}, which cannot be computed on parts", name))


def _whole_forward(module: nn.Module, path: str, run: WholeRun) -> Callable[[Tensor], Tensor]:
    plain = module.forward

    def forward(input: Tensor) -> Tensor:  # noqa: A002
        with run.muted():
            output: Tensor = plain(input)
            run.note_module(path, [input], [output])
        return output

    return forward


def _computed(module: nn.Module, x: Tensor, style: ModuleStyle, sizes: Mapping[str, int]) -> Tensor:
    """Something of the shape that the module gives on a tensor rank, made from its input and its weight."""
    parts = prod(sizes[a] for a in style.outputs)
    if isinstance(module, nn.Embedding):
        y = nn.functional.embedding(x % module.weight.shape[0], module.weight)
    else:
        assert isinstance(module, nn.Linear)
        y = nn.functional.linear(x[..., : module.weight.shape[1]].contiguous(), module.weight, module.bias)
    return torch.cat([y] * parts, -1) if parts > 1 and style.gives_whole else y


def _first(placement: Placement) -> int:
    return next(d for d, axes in enumerate(placement) if axes)
