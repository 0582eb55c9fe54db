"""Reading a model's facts by running it once, without its weights.

This module, `probe_pass` and `probe_rows` are the only ones of lowering that import torch. The model is built with its parameters on the meta device (names and shapes), then every
parameter gets the memory of one scalar, expanded to its shape, and the model's own forward runs twice, with two and with three rows, which shows what grows with the rows.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from attrs import evolve
from torch import Tensor, nn

from pdsl.grammar.errors import ModelError
from pdsl.lowering.chain import Observation, Structure, assemble, assemble_unrun, assemble_whole
from pdsl.lowering.factory import brief_signature, call_factory, describe_error, on_path, resolve
from pdsl.lowering.facts import SINGLE_INPUT, TARGETS, ModelFacts, ParameterFacts, target_of
from pdsl.lowering.precision import AS_MADE, RunAs, applies
from pdsl.lowering.probe_memory import Memories, shared_memory
from pdsl.lowering.probe_numerics import Numerics, layer_modules, matched_modules
from pdsl.lowering.probe_pass import NotAChain, Recorder, is_plain_sequential, parameter_groups
from pdsl.lowering.probe_rows import is_shared
from pdsl.lowering.values import near

__all__ = ["give_memory", "on_meta", "parameters_on_meta", "probe", "skeleton", "take_rows", "taken_entries"]

_ROWS = (2, 3)
_FILL = 0.02  # one value for all parameters; only shapes matter
_LARGEST_REAL = 1 << 28  # elements that may be real memory when a model refuses expanded parameters


def probe(
    factory: str | Callable[..., nn.Module],
    arguments: Mapping[str, object],
    *,
    batch: Mapping[str, Tensor] | Tensor | None,
    directory: str = ".",
    chain: Sequence[str] | None = None,
    run_as: RunAs = AS_MADE,
) -> ModelFacts:
    """The facts of the model that `factory(**arguments)` makes; a string `"module:factory"` is imported with `directory` on the path.

    `batch` is a batch of data of any number of rows, as the model's forward takes it by keywords (a single tensor: as its one argument; an
    `nn.Sequential` takes the first entry); a target that the forward does not take is left to the objective. With None the model does not run and the boundaries stay unknown. `chain` names the modules that are the
    blocks, as a method or attribute `pdsl_chain` of the model does; otherwise they are found. `run_as` says in which formats it is going to run, and which modules it is going
    to compute twice; it is then run once more, that way.

    Raises ModelError if the model cannot be built or run, or if a listed chain is none.
    """
    name = factory if isinstance(factory, str) else f"{factory.__module__}:{factory.__qualname__}"
    with on_path(directory), torch.random.fork_rng(devices=[]):
        make = resolve(factory, directory) if isinstance(factory, str) else factory
        model = skeleton(make, arguments, name)
        model.train()
        target = _target(batch)
        batch = taken_entries(model, batch)
        structure = _structure(model, name, batch)
        named = chain if chain is not None else _listed(model)
        listed = _checked_chain(model, named, name) if named is not None else None
        if batch is None:
            return assemble_unrun(structure, _unrun_blocks(model, listed), tuple(_outermost(model)))
        found, blocks = _run(model, structure, listed, batch)
        if run_as.held_out is not None and blocks:
            found = _cut_in_eval(model, structure, blocks, batch, found)
        found = evolve(found, target=target)
        casts = applies(run_as.precision, found)
        recomputed = matched_modules(model, found, run_as.recompute) if run_as.recompute is not None else ()
        if not casts and not recomputed:
            return found
        return _run_as_asked(
            model, structure, blocks, batch, Numerics(found, run_as.precision, casts, casts_output=casts, recompute=recomputed)
        )


# --- building without weights -------------------------------------------------------------------------------------------------------------


def on_meta(parameter: nn.Parameter, memories: Memories | None = None) -> nn.Parameter:
    """The same parameter without memory; attributes set on it are kept. With `memories` it shares its storage with those that it shared it with."""
    plain = memories is None or parameter.layout != torch.strided
    tensor = torch.empty_like(parameter.detach(), device="meta") if memories is None or plain else memories.bare(parameter.detach())
    bare = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    bare.__dict__.update(parameter.__dict__)
    return bare


@contextmanager
def parameters_on_meta(keep: Callable[[int], bool] = lambda _: False, seen: list[nn.Parameter] | None = None) -> Iterator[Memories]:
    """Within the block every parameter moves to the meta device when a module registers it; buffers stay real.

    `keep(k)` says whether the k-th parameter stays real; `seen` collects what was registered. Ties made with one object stay ties.
    """
    original = nn.Module.register_parameter
    moved: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}
    known: set[int] = set()
    count = 0

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal count
        original(module, name, parameter)
        if parameter is None or id(parameter) in known:
            return
        before = moved.get(id(parameter))
        if before is not None and before[0]() is parameter:
            module._parameters[name] = before[1]
            return
        kept = parameter if parameter.device.type == "meta" or keep(count) else on_meta(parameter, memories)
        count += 1
        if kept is not parameter:
            moved[id(parameter)] = (weakref.ref(parameter), kept)
        module._parameters[name] = kept
        known.add(id(kept))
        alive.append(kept)

    alive: list[nn.Parameter] = seen if seen is not None else []
    memories = Memories()
    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield memories
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def skeleton(make: Callable[..., nn.Module], arguments: Mapping[str, object], name: str) -> nn.Module:
    """The model with its parameters on the meta device. A factory that reads values of its parameters is run plainly."""
    try:
        with parameters_on_meta() as memories:
            model = call_factory(make, arguments, name)
    except ModelError:
        memories = Memories()
        model = call_factory(make, arguments, name)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name} returned a {type(model).__name__}: expected a torch.nn.Module")
    memories.note(model)
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise ModelError(
                    f"{name}: parameter {key} of {type(module).__name__} has no shape yet: lazy modules must be run once in the factory"
                )
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                module._buffers[key] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    return model


def _structure(model: nn.Module, name: str, batch: Mapping[str, Tensor] | Tensor | None) -> Structure:
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters, warnings = [], []
    for canonical, group in parameter_groups(model).items():
        holder, p = type(modules[canonical.rpartition(".")[0]]).__name__, group[0][1]
        aliases = tuple(alias for alias, _ in group[1:])
        dtype = str(p.dtype).removeprefix("torch.")
        parameters.append(ParameterFacts(canonical, tuple(p.shape), dtype, p.requires_grad, (), holder, aliases))
        warnings += [
            f"{alias} and {canonical} share memory but are two parameters; PDSL trains them as one" for alias, q in group[1:] if q is not p
        ]
        if any(getattr(q, hooks, None) for _, q in group for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks")):
            warnings.append(f"{canonical} has hooks on its gradient: they run once a microbatch, and not at all where it is sharded")
    statistics = []
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            statistics.append(path)
            warnings.append(
                f"{path} ({type(module).__name__}) normalises over the rows of one microbatch, not over the batch"
                + (", and its running statistics count every microbatch" if module.track_running_stats else "")
            )
    inputs = (SINGLE_INPUT,) if isinstance(batch, Tensor) else tuple(batch or ())
    sequential = is_plain_sequential(model)
    return Structure(
        factory=name,
        parameters=tuple(parameters),
        buffers=tuple(n for n, _ in model.named_buffers()),
        inputs=inputs[:1] if sequential else inputs,
        sequential=sequential,
        statistics=tuple(statistics),
        shares=shared_memory(model),
        warnings=tuple(warnings),
        torch=str(torch.__version__),
    )


def give_memory(
    model: nn.Module, *, real: bool = False, numerics: Numerics | None = None, parts: Mapping[str, Sequence[int]] | None = None
) -> None:
    """Replace every parameter by one of the same shape: one scalar expanded, or real memory. Everything floating needs a gradient now.

    With `parts` each gets a part only, and they say how many there are along each dim.
    """
    for canonical, group in parameter_groups(model).items():
        shape, dtype = group[0][1].shape, group[0][1].dtype if numerics is None else numerics.dtype(canonical)
        if parts is not None:
            shape = torch.Size(size // count for size, count in zip(shape, parts[canonical], strict=True))
        floating = dtype.is_floating_point or dtype.is_complex
        scalar = torch.full((), _FILL if floating else 0, dtype=dtype)
        memory = scalar.expand(shape).clone() if real else scalar.expand(shape)
        twin = nn.Parameter(memory, requires_grad=floating)
        for name, parameter in group:
            owner, _, leaf = name.rpartition(".")
            twin.__dict__.update(parameter.__dict__)
            model.get_submodule(owner)._parameters[leaf] = twin


# --- finding the blocks -------------------------------------------------------------------------------------------------------------------


def _listed(model: nn.Module) -> Sequence[str] | None:
    found = getattr(model, "pdsl_chain", None)
    return found() if callable(found) else found


def _checked_chain(model: nn.Module, names: Sequence[str], factory: str) -> tuple[str, ...]:
    """The listed blocks; a list of modules stands for its children."""
    modules = dict(model.named_modules())
    chain: list[str] = []
    for name in names:
        if name not in modules or not name:
            close = near(str(name), [m for m in modules if m])
            raise ModelError(
                f"{factory}: the chain lists {name}, and there is no such module" + (f"; did you mean {close}" if close else "")
            )
        inner = modules[name]
        chain += [f"{name}.{child}" for child in inner._modules] if isinstance(inner, nn.ModuleList) else [name]
    twice = next((name for i, name in enumerate(chain) if name in chain[:i]), None)
    if twice is not None:
        raise ModelError(f"{factory}: the chain lists {twice} twice")
    if not chain:
        raise ModelError(f"{factory}: the chain is empty")
    return tuple(chain)


def _found_lists(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The children of the longest outermost list of at least two modules of one class, and of all others of that length."""
    lists: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        children = list(module.children())
        same = len(children) > 1 and len({type(c) for c in children}) == 1 and any(True for c in children for _ in c.parameters())
        if path and same and isinstance(module, nn.ModuleList | nn.Sequential) and not any(path.startswith(f"{p}.") for p in lists):
            lists[path] = module
    if not lists:
        return ()
    longest = max(len(m._modules) for m in lists.values())
    chosen = sorted((p for p, m in lists.items() if len(m._modules) == longest), key=lambda p: not isinstance(lists[p], nn.ModuleList))
    return tuple(tuple(f"{path}.{child}" for child in lists[path]._modules) for path in chosen)


def _unrun_blocks(model: nn.Module, listed: tuple[str, ...] | None) -> tuple[str, ...]:
    if listed is not None:
        return listed
    if is_plain_sequential(model):
        return tuple(model._modules)
    found = _found_lists(model)
    return found[0] if found else ()


def _outermost(model: nn.Module, prefix: str = "") -> Iterator[str]:
    """The modules closest to the root that hold parameters and are no mere containers of others."""
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _outermost(child, f"{path}.")
        elif any(True for _ in child.parameters()):
            yield path


# --- running ------------------------------------------------------------------------------------------------------------------------------


def _run(
    model: nn.Module, structure: Structure, listed: tuple[str, ...] | None, batch: Mapping[str, Tensor] | Tensor
) -> tuple[ModelFacts, tuple[str, ...]]:
    """The facts, and the names of the blocks that are called one after the other; none if there are none."""
    few, many = _ROWS
    give_memory(model)

    def passes(blocks: tuple[str, ...]) -> tuple[Observation, Observation]:
        return _observe(model, structure, blocks, batch, few), _observe(model, structure, blocks, batch, many)

    reasons: list[str] = []
    for blocks in _attempts(model, structure, listed):
        try:
            small, large = passes(blocks)
            if small.order != large.order:
                raise NotAChain(f"the blocks are called in another order with {few} rows than with {many}")
            return assemble(structure, small, large), blocks
        except NotAChain as refusal:
            reasons.append(str(refusal))
    if listed is not None:
        raise ModelError(f"{structure.factory}: the listed modules are no chain: {reasons[-1]}")
    reason = reasons[-1] if reasons else "there is no list of at least two modules of one class; a method pdsl_chain may name the blocks"
    return assemble_whole(structure, *passes(()), reason), ()


def _cut_in_eval(
    model: nn.Module, structure: Structure, blocks: tuple[str, ...], batch: Mapping[str, Tensor] | Tensor, trained: ModelFacts
) -> ModelFacts:
    """The facts without the cuts before which something else crosses in eval mode, in which held-out rows are run, than in training."""
    mode = "in eval mode, in which held-out rows run,"
    model.eval()
    try:
        held = assemble(structure, *(_observe(model, structure, blocks, batch, rows) for rows in _ROWS))
    except (ModelError, NotAChain) as error:
        return evolve(trained, layers=tuple(evolve(x, cut_before=x.cut_before or f"{mode} {error}") for x in trained.layers))
    finally:
        model.train()
    layers = []
    for mine, theirs in zip(trained.layers, held.layers, strict=True):
        other = theirs.cut_before or ("other tensors cross than in training" if mine.inputs != theirs.inputs else "")
        layers.append(evolve(mine, cut_before=mine.cut_before or f"{mode} {other}") if other else mine)
    return evolve(trained, layers=tuple(layers))


def _run_as_asked(
    model: nn.Module, structure: Structure, blocks: tuple[str, ...], batch: Mapping[str, Tensor] | Tensor, numerics: Numerics
) -> ModelFacts:
    """The facts of a model in the formats, and with the recomputation, that were asked for. Its loss may be computed by code that does not take the last
    module's output in another format; then it is left as it is.
    """
    plain = numerics.facts

    def attempt(how: Numerics) -> ModelFacts:
        give_memory(model, numerics=how)
        small, large = (_observe(model, structure, blocks, batch, rows, how) for rows in _ROWS)
        reason = plain.warnings[0].partition(": ")[2] if not blocks else ""
        found = assemble(structure, small, large) if blocks else assemble_whole(structure, small, large, reason)
        kept = [layer.modules for layer in plain.layers] == [layer.modules for layer in found.layers]
        if not kept:
            raise ModelError("its layers are other ones then")
        cuts = (evolve(b, cut_before=b.cut_before or a.cut_before) for a, b in zip(plain.layers, found.layers, strict=True))
        return evolve(
            found,
            layers=tuple(cuts),
            target=plain.target,
            recomputed=how.recompute,
            unrepeatable=small.unrepeatable,
            casts_output=how.casts_output,
        )

    reason = ""
    for how in dict.fromkeys((numerics, evolve(numerics, casts_output=False))):
        try:
            return attempt(how)
        except (ModelError, NotAChain) as error:
            reason = str(error)
    return evolve(plain, recomputed=numerics.recompute, refuses=_refusal(model, plain, numerics, reason))


def _refusal(model: nn.Module, plain: ModelFacts, numerics: Numerics, reason: str) -> str:
    """Why a model does not run in the formats that were asked for: with the floating buffers, if its code mixes them with what it computes."""
    buffers = [
        (name, b.dtype)
        for name, b in model.named_buffers()
        if b.is_floating_point() and any(name.startswith(f"{m}.") for m in layer_modules(plain))
    ]
    text = reason.rpartition(": ")[2] if not buffers else reason
    if not buffers:
        return text
    name, dtype = buffers[0]
    home = type(model.get_submodule(name.rpartition(".")[0])).__name__
    more = f" (and {len(buffers) - 1} more)" if len(buffers) > 1 else ""
    return f"{text}; its buffer {name}{more} of {home} stays in {str(dtype).removeprefix('torch.')}"


def _attempts(model: nn.Module, structure: Structure, listed: tuple[str, ...] | None) -> Iterator[tuple[str, ...]]:
    if listed is not None:
        yield listed
    elif structure.sequential:
        yield tuple(model._modules)
    else:
        lists = _found_lists(model)
        if len(lists) > 1:
            yield tuple(name for names in lists for name in names)
        if lists:
            yield lists[0]


def _observe(
    model: nn.Module,
    structure: Structure,
    blocks: tuple[str, ...],
    batch: Mapping[str, Tensor] | Tensor,
    rows: int,
    numerics: Numerics | None = None,
) -> Observation:
    """One forward pass. Raises NotAChain, or ModelError if the model itself fails."""
    taken = {k: take_rows(t, rows) for k, t in batch.items()} if isinstance(batch, Mapping) else {SINGLE_INPUT: take_rows(batch, rows)}
    first = next(iter(taken.values()))
    args, kwargs = ((first,), {}) if structure.sequential or isinstance(batch, Tensor) else ((), taken)
    _check_call(model, args, kwargs, structure.factory)
    try:
        return Recorder(model, blocks, taken, numerics).run(args, kwargs, rows)
    except Exception as error:
        numel = sum(p.numel for p in structure.parameters)
        stride_zero = any(p.numel() > 1 and not any(p.stride()) for p in model.parameters())
        if stride_zero and numel <= _LARGEST_REAL:  # some kernels refuse expanded weights
            give_memory(model, real=True, numerics=numerics)
            return _observe(model, structure, blocks, batch, rows, numerics)
        given = ", ".join(f"{k}: {str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for k, t in taken.items())
        raise ModelError(f"{structure.factory}: the forward pass failed on a batch of {given}: {describe_error(error)}") from error


def taken_entries(model: nn.Module, batch: Mapping[str, Tensor] | Tensor | None) -> Mapping[str, Tensor] | Tensor | None:
    """The batch without its target, if the model's forward takes the rest and not the whole."""
    if not isinstance(batch, Mapping) or is_plain_sequential(model):
        return batch
    rest = {name: tensor for name, tensor in batch.items() if name not in TARGETS}
    return rest if rest and _takes(model, rest) and not _takes(model, batch) else batch


def _target(batch: Mapping[str, Tensor] | Tensor | None) -> tuple[int, ...] | None:
    """The shape of the target of one row."""
    found = target_of(batch) if isinstance(batch, Mapping) else None
    return tuple(found.shape[1:]) if found is not None else None


def _takes(model: nn.Module, batch: Mapping[str, Tensor]) -> bool:
    try:
        inspect.signature(model.forward).bind(**batch)
    except TypeError:
        return False
    return True


def take_rows(tensor: Tensor, rows: int) -> Tensor:
    """As many rows of a batch entry, taken again from the first where they are too few."""
    return tensor if tensor.dim() == 0 or is_shared(tensor) else tensor[torch.arange(rows) % tensor.shape[0]]


def _check_call(model: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor], factory: str) -> None:
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = ", ".join(kwargs) or "one tensor"
        raise ModelError(f"{factory}: the model's forward takes {brief_signature(signature)} and the data gives {given}: {error}") from None
