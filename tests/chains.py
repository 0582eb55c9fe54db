"""Small models with all the ways in which a chain of blocks may be awkward, and the means to run one cut into stages by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pdsl.lowering.facts import ModelFacts
from pdsl.runtime.build import build_model
from pdsl.runtime.stage import StageModule

__all__ = ["batch_of", "run_split", "run_whole"]

VOCABULARY, WIDTH, LENGTH = 13, 8, 6


def batch_of(rows: int = 3, length: int = LENGTH) -> dict[str, Tensor]:
    """Tokens and targets; some targets do not count, and the end of each row but the first is padding (token 0)."""
    generator = torch.Generator().manual_seed(rows)
    tokens = torch.randint(1, VOCABULARY, (rows, length), generator=generator)
    tokens[1:, -2:] = 0
    targets = torch.randint(VOCABULARY, (rows, length), generator=generator)
    targets[0, 0] = -100
    return {"tokens": tokens, "targets": targets}


# --- running --------------------------------------------------------------------------------------------------------------------------------


def run_whole(
    factory: Callable[..., nn.Module], arguments: Mapping[str, Any], batch: Mapping[str, Tensor], seed: int = 5
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one process, by every name that `named_parameters` gives."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = factory(**arguments)
    model.train()
    loss = _scalar(_call(model, batch))
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def run_split(
    factory: Callable[..., nn.Module],
    arguments: Mapping[str, Any],
    facts: ModelFacts,
    batch: Mapping[str, Tensor],
    cuts: Sequence[int],
    seed: int = 5,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The same, with one model object a stage that has nothing but its own layers in memory."""
    bounds = [0, *cuts, len(facts.layers)]
    stages, passed = [], []
    for start, stop in itertools.pairwise(bounds):
        owned = {p.name for p in facts.parameters if set(p.layers) & set(range(start, stop))}
        model = build_model(factory, arguments, seed=seed, owned=owned, name="model")
        model.train()
        in_memory = {n for n, p in model.named_parameters() if p.device.type != "meta"}
        assert in_memory == owned
        stages.append(StageModule(model, facts, start, stop))
    received: tuple[Tensor, ...] = ()
    for stage, start in zip(stages, bounds, strict=False):
        kinds = facts.layers[start].inputs if start else ()
        received = tuple(t.detach().requires_grad_(k.differentiable) for t, k in zip(received, kinds, strict=True))
        rows = len(next(iter(batch.values())))
        assert [tuple(t.shape) for t in received] == [k.shape(rows) for k in kinds]
        output = stage(received, batch)
        passed.append((received, output))
        received = output if isinstance(output, tuple) else ()
    loss = _scalar(passed[-1][1])
    loss.backward()
    for (_, output), (after, _) in zip(reversed(passed[:-1]), reversed(passed[1:]), strict=True):
        pairs = [(t, r.grad) for t, r in zip(output, after, strict=True) if r.grad is not None]
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
    gradients: dict[str, Tensor] = {}
    for stage in stages:
        for name, p in stage.model.named_parameters():
            if p.grad is not None:
                gradients[name] = gradients[name] + p.grad if name in gradients else p.grad
    return loss.detach(), gradients


def _call(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    return model(next(iter(batch.values()))) if isinstance(model, nn.Sequential) else model(**batch)


def _scalar(output: Any) -> Tensor:
    """The loss; an output that is none is squared, with weights that differ from place to place."""
    if isinstance(output, tuple):
        output = output[0]
    if output.dim() == 0:
        return output
    return (output.square() * torch.linspace(0.5, 1.5, output.numel()).view_as(output)).mean()


# --- models ---------------------------------------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Embedding, blocks, head, cross entropy; the parts between are for the models below."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        return self.loss(self.run(self.embed(tokens), tokens), targets)

    def run(self, x: Tensor, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), ignore_index=-100)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x))


def plain(blocks: int = 4) -> Chain:
    return Chain([Plain() for _ in range(blocks)])


class Shared(Chain):
    """A padding mask made from the tokens and a learned bias, both handed to every block by keyword."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, *, mask: Tensor, bias: Tensor) -> Tensor:
            mixed = torch.softmax((x @ x.transpose(1, 2) + bias).masked_fill(~mask[:, None, :], -1e9), -1) @ x
            return x + torch.tanh(self.up(mixed))

    def __init__(self, blocks: int = 4) -> None:
        super().__init__([Shared.Block() for _ in range(blocks)])
        self.table = nn.Embedding(LENGTH * LENGTH, 1)

    def run(self, x: Tensor, tokens: Tensor) -> Tensor:
        bias = self.table(torch.arange(LENGTH * LENGTH)).view(LENGTH, LENGTH)
        for block in self.blocks:
            x = block(x, mask=tokens != 0, bias=bias)
        return x


class HandedParameter(Chain):
    """A bare parameter that is itself an argument of every block: used in all, carried by none."""

    class Block(Plain):
        def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return super().forward(x + bias)

    def __init__(self, blocks: int = 3) -> None:
        super().__init__([HandedParameter.Block() for _ in range(blocks)])
        self.bias = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def run(self, x: Tensor, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.bias)
        return x


class Tuples(Chain):
    """Blocks give (hidden, bias, mask): the first makes the bias, the others hand it on, and nobody else has it."""

    class Block(nn.Module):
        def __init__(self, first: bool) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)
            self.bias = nn.Linear(WIDTH, WIDTH) if first else None

        def forward(self, x: Tensor, bias: Tensor | None, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            if bias is None:
                bias = self.bias(x).permute(2, 0, 1)
            return x + torch.tanh(self.up(x + bias.permute(1, 2, 0))) * mask, bias, mask

    def __init__(self, blocks: int = 4) -> None:
        super().__init__([Tuples.Block(first=i == 0) for i in range(blocks)])

    def run(self, x: Tensor, tokens: Tensor) -> Tensor:
        bias, mask = None, (tokens != 0).unsqueeze(-1)
        for block in self.blocks:
            x, bias, mask = block(x, bias, mask)
        return x


class EncoderDecoder(nn.Module):
    """Two lists of equal length; the decoder's blocks all read what the encoder gave, and a norm stands between."""

    class Decoder(Plain):
        def forward(self, x: Tensor, states: Tensor | None = None) -> Tensor:
            return super().forward(x) + states.mean(1, keepdim=True)

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.decoder = nn.ModuleList([EncoderDecoder.Decoder() for _ in range(2)])
        self.encoder = nn.ModuleList([Plain() for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.shared(tokens)
        for block in self.encoder:
            x = block(x)
        states = self.norm(x)
        y = self.shared(tokens.flip(1))
        for block in self.decoder:
            y = block(y, states=states)
        return F.cross_entropy((y @ self.shared.weight.T).flatten(0, 1), targets.flatten(), ignore_index=-100)


class Glue(Chain):
    """A norm between the blocks, outside of them, and an embedding that also gives a table that does not depend on its weights."""

    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(VOCABULARY, WIDTH)
            self.register_buffer("scale", torch.linspace(1, 2, WIDTH), persistent=False)

        def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
            return self.words(tokens), self.scale * (tokens != 0).unsqueeze(-1)

    class Block(Plain):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return super().forward(x * scale)

    def __init__(self) -> None:
        super().__init__([Glue.Block() for _ in range(3)])
        self.embed = Glue.Embedding()
        self.norms = nn.ModuleDict({f"n{i}": nn.LayerNorm(WIDTH) for i in range(2)})

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        x, scale = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, scale)
            if i < 2:
                x = self.norms[f"n{i}"](x)
        return self.loss(x, targets)


class InPlace(Chain):
    """Blocks that add into what they are given."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x += torch.tanh(self.up(x.clone()))
            return x

    def __init__(self) -> None:
        super().__init__([InPlace.Block() for _ in range(3)])


class Gained(Chain):
    """Parameters of the blocks are read outside of the blocks: before, after and between."""

    class Block(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(0.7))
            self.row = nn.Parameter(torch.linspace(-1, 1, WIDTH)[None])

    def __init__(self) -> None:
        super().__init__([Gained.Block() for _ in range(3)])

    def run(self, x: Tensor, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x * block.gain) + block.row
        return x


class Recomputing(Chain):
    """Blocks run again in the backward; `through` says how: with the block itself, a function around it, two blocks at once, or never."""

    def __init__(self, through: str = "block", dropout: float = 0.0) -> None:
        super().__init__([nn.Sequential(Plain(), nn.Dropout(dropout)) for _ in range(4)])
        self.through = through

    def run(self, x: Tensor, tokens: Tensor) -> Tensor:
        if self.through == "pairs":
            for a, b in zip(self.blocks[::2], self.blocks[1::2], strict=True):
                x = checkpoint(lambda x, a=a, b=b: b(a(x)), x, use_reentrant=False)
            return x
        for block in self.blocks:
            if self.through == "never":
                x = block(x)
            elif self.through == "function":
                x = checkpoint(lambda x, block=block: block(x + 1), x, use_reentrant=False)
            else:
                x = checkpoint(block, x, use_reentrant=self.through == "reentrant")
        return x


class Supervised(Chain):
    """The loss reads inside the first block's result: no cut is right after it."""

    def __init__(self) -> None:
        super().__init__([Plain() for _ in range(3)])

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        x = early = self.blocks[0](self.embed(tokens))
        for block in self.blocks[1:]:
            x = block(x)
        return self.loss(x, targets) + 0.1 * early.square().mean()


class Repeated(Chain):
    """One block that is called again and again."""

    def __init__(self) -> None:
        super().__init__([Plain(), Plain()])

    def run(self, x: Tensor, tokens: Tensor) -> Tensor:
        for _ in range(3):
            x = self.blocks[0](x)
        return self.blocks[1](x)


class NoList(nn.Module):
    """Nothing that repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.middle = Plain()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.middle(self.embed(tokens))).flatten(0, 1), targets.flatten())


class Listed(NoList):
    """The same, and it says itself what its chain is."""

    def pdsl_chain(self) -> list[str]:
        return ["embed", "middle", "head"]


class Mistyped(NoList):
    pdsl_chain = ("embed", "middel", "head")


class Frozen(Chain):
    """The embedding is not trained, so what leaves it needs no gradient; one parameter is not used at all."""

    def __init__(self) -> None:
        super().__init__([Plain() for _ in range(2)])
        self.embed.weight.requires_grad_(False)
        self.pooler = nn.Linear(WIDTH, WIDTH)


class Normed(Chain):
    """Batch statistics inside a block."""

    class Block(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm1d(LENGTH)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.bn(x))

    def __init__(self) -> None:
        super().__init__([Normed.Block() for _ in range(2)])


class ReadsItsWeights(Chain):
    """Building it needs values of parameters, and of a tensor."""

    def __init__(self) -> None:
        super().__init__([Plain() for _ in range(2)])
        self.rates = [r.item() for r in torch.linspace(0, 1, 2)]
        self.norm = self.head.weight.detach().norm().item()


def shared(blocks: int = 4) -> nn.Module:
    return Shared(blocks)


def layers(sizes: Sequence[int] = (5, 7, 7, 3)) -> nn.Sequential:
    """Linear and ReLU in turn, of different widths."""
    parts: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        parts += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def twice() -> nn.Sequential:
    """One linear map at two places of a sequence."""
    again = nn.Linear(5, 5)
    return nn.Sequential(again, nn.Tanh(), again, nn.Linear(5, 2))


class Split(nn.Module):
    """For a sequence whose parts hand on pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 5)

    def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        a, b = x if isinstance(x, tuple) else (x, x)
        return torch.tanh(self.up(a)) + b, a


def pairs() -> nn.Sequential:
    return nn.Sequential(Split(), Split(), Split())


def broken() -> nn.Module:
    raise KeyError("no such preset: tiny")


def forgetful() -> None:
    return None


class Fails(Chain):
    def __init__(self) -> None:
        super().__init__([Plain() for _ in range(2)])

    def run(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x.view(-1, 7)
