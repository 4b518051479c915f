"""State that is spread over ranks, for tests: made, saved and resumed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from drumline.checkpoint.restoring import resume
from drumline.checkpoint.state import tensors_of
from drumline.files.run_folder import RunFolder
from drumline.parallel.world import World, join
from helpers.ranks import Outcome, run_ranks
from helpers.saved import saver_of, state

PLAIN, TWO, THREE, HSDP = (1, 1), (1, 2), (1, 3), (2, 2)
"""Groups, and ranks in each."""
SHARDINGS = [PLAIN, TWO, THREE, HSDP]


class Model(nn.Module):
    """Rows that ranks cannot share evenly, fewer of them than ranks, buffers, tied weights and another dtype."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, width)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.one = nn.Linear(width, 1)
        self.low = nn.Parameter(torch.empty(5, 3, dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(width))


def made(seed: int, mesh: DeviceMesh | None = None, *, width: int = 8) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with optimizer state, a function of the seed alone, spread over a mesh."""
    torch.manual_seed(seed)
    model = Model(width)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randint(-99, 99, tensor.shape) / 64)
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        shape = parameter.shape
        whole = {"exp_avg": torch.rand(shape), "exp_avg_sq": torch.rand(shape), "variance": torch.rand(shape[0], 1)}
        own: dict[str, Any] = {"step": torch.tensor(float(seed))}
        for kind, each in whole.items():
            own[kind] = each if mesh is None else distribute_tensor(each, mesh, _placements(parameter))
        optimizer.state[parameter].update(own)
    return model, optimizer


def _placements(parameter: Any) -> Any:
    return parameter.placements


def mesh_of(sharding: tuple[int, int]) -> DeviceMesh | None:
    groups, ranks = sharding
    if groups * ranks == 1:
        return None
    if groups == 1:
        return init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    return init_device_mesh("cpu", (groups, ranks), mesh_dim_names=("replicate", "shard"))


def joined(sharding: tuple[int, int]) -> tuple[World, DeviceMesh | None]:
    world = join(device="cpu")
    return world, mesh_of(sharding)


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors: dict[str, Any] = tensors_of(model, optimizer)
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in tensors.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape)
        and torch.equal(tensor.reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8))
        for name, tensor in one.items()
    )


def on_ranks(
    work: Callable[..., Any], sharding: tuple[int, int], *arguments: Any, environ: dict[str, str] | None = None
) -> list[Outcome]:
    """`work(sharding, *arguments)` on as many ranks as it has; all of them end well."""
    size = sharding[0] * sharding[1]
    outcomes = run_ranks(work, [(sharding, *arguments)] * size, environ=environ)
    assert [outcome.code for outcome in outcomes] == [0] * size, [outcome.err for outcome in outcomes]
    return outcomes


def saves(sharding: tuple[int, int], run: Path, *steps: int) -> None:
    """A checkpoint of each step, with state of its own."""
    world, mesh = joined(sharding)
    for step in steps:
        saver = saver_of(RunFolder(run), world=world, of=made(step, mesh))
        saver.save(state(step))
        saver.wait()
        world.gather(None)
        saver.close()


def resumed(
    world: World, mesh: DeviceMesh | None, run: Path, resume_from: str = "auto", **more: Any
) -> tuple[int | None, bool, list[str]]:
    """The step that a run goes on from, and whether all of its state has the bits of that step."""
    model, optimizer = made(99, mesh)
    said: list[str] = []
    folder = RunFolder(run)
    settings: dict[str, Any] = {"facts": {}, "allow_change": (), "snapshots": None, **more}
    at = resume(resume_from, folder, world, model, optimizer, say=said.append, **settings)
    if at is None:
        return None, False, said
    return at.step, same(whole(model, optimizer), whole(*made(at.step))), said
