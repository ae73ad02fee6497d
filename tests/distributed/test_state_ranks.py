"""States and results of ranks with slices: killed at any moment, complete or absent; in several files, the same model."""

import json
import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from helpers.ranks import run_ranks, start_ranks
from helpers.toy_training import ToyMethod, ToyReader, make_loop, weights_of
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from wandistiller.checkpoint import formats
from wandistiller.checkpoint.trained import follow_model, write_model
from wandistiller.checkpoint.training_state import TrainingStates, is_complete, load_state
from wandistiller.distributed.parallel import Parallel
from wandistiller.distributed.pieces import gather_to_host, local
from wandistiller.distributed.ranks import joined
from wandistiller.distributed.sharding import Sharding
from wandistiller.errors import TrainingError
from wandistiller.memory.subjects import stored_subject
from wandistiller.models.load import load_model
from wandistiller.models.sizes import SIZES
from wandistiller.models.stored import TRANSFORMER, inspect_checkpoint
from wandistiller.train import loop as loop_module
from wandistiller.train.across_ranks import AcrossRanks
from wandistiller.train.runs import resume_run

CPU = torch.device("cpu")
STEPS = 60
KILLS = 8


def method_of(rank):
    """Return a method that draws other random numbers on each rank, with the same weights."""
    method = ToyMethod(dropout=0.2)
    torch.manual_seed(rank)
    return method


def toy(folder, ranks, steps=STEPS, **options):
    """Return a loop whose model is in slices."""
    method = method_of(ranks.rank)
    model = method.student.model
    mesh = Parallel("fsdp", ranks.world_size).mesh(ranks, CPU)
    method.student.sharding = Sharding(model, [model[0]], mesh)
    loop = make_loop(folder, steps=steps, method=method, ranks=ranks, log_every=7, **options)
    newest = loop._saves.states.newest() if folder is not None else None
    if newest is not None:
        loop.load(load_state(newest, loop.like))
    return loop


def train(folder):
    with joined(CPU, needs_group=True) as ranks:
        loop = toy(folder / "states", ranks, save_every=1)
        loop.run()
        weights = gather_to_host(weights_of(loop))
        if ranks.is_first:
            torch.save(weights, folder / "weights.pt")


def straight(folder):
    with joined(CPU, needs_group=True) as ranks:
        loop = toy(None, ranks)
        loop.run()
        weights = gather_to_host(weights_of(loop))
        if ranks.is_first:
            torch.save(weights, folder / "straight.pt")


def newest_step(folder):
    return max((int(path.name.removeprefix("step-")) for path in (folder / "states").glob("step-*")), default=0)


def test_ranks_killed_in_the_middle_of_saving_go_on_from_a_complete_state(tmp_path):
    """One of two is killed, the other ends in its own way or is killed too; every state that counts is whole."""
    run_ranks(2, straight, tmp_path, folder=tmp_path)
    rng = random.Random(0)
    for attempt in range(KILLS + 1):
        processes = start_ranks(2, train, tmp_path, folder=tmp_path)
        if attempt < KILLS:
            target = newest_step(tmp_path) + rng.randint(1, 4)
            while newest_step(tmp_path) < target and all(process.is_alive() for process in processes):
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.02))
            for process in rng.sample(processes, 2):
                os.kill(process.pid, signal.SIGKILL)
                time.sleep(rng.uniform(0, 0.02))
        for process in processes:
            process.join(60)
        for path in (tmp_path / "states").glob("step-*"):
            assert is_complete(path) or not (path / "state.json").exists()
        assert (tmp_path / "weights.pt").exists() == (attempt == KILLS)
        assert attempt == KILLS or newest_step(tmp_path) >= target, "killed while it saved, not before"
    found, expected = (torch.load(tmp_path / name) for name in ("weights.pt", "straight.pt"))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def export(folder):
    formats.MAX_SHARD_BYTES = 200_000
    with joined(CPU, needs_group=True) as ranks:
        torch.manual_seed(0)
        model = WanTransformer3DModel(**SIZES["tiny"].transformer)
        mesh = Parallel("hsdp", 2).mesh(ranks, CPU)
        assert mesh.mesh.tolist() == [[0, 1], [2, 3]], "neighbours, which are on one machine, hold a copy between them"
        Sharding(model, list(model.blocks), mesh)
        if ranks.is_first:
            write_model(folder / "model", model)
        else:
            follow_model(model)
        # DCP's own way to the whole is another one than ours.
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if ranks.is_first:
            torch.save(whole, folder / "whole.pt")


def test_slices_are_written_as_one_model_in_several_files(tmp_path):
    run_ranks(4, export, tmp_path, folder=tmp_path)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    assert json.loads((tmp_path / "model" / "config.json").read_text())["_class_name"] == "WanTransformer3DModel"
    found = WanTransformer3DModel.from_pretrained(tmp_path / "model").state_dict()
    expected = torch.load(tmp_path / "whole.pt")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], value) for name, value in expected.items())
    torch.manual_seed(0)
    start = WanTransformer3DModel(**SIZES["tiny"].transformer).state_dict()
    assert all(torch.equal(found[name], value) for name, value in start.items())


def slices(folder):
    with joined(CPU, needs_group=True) as ranks:
        stored = inspect_checkpoint(folder, TRANSFORMER)
        mesh = Parallel("fsdp", ranks.world_size).mesh(ranks, CPU)
        subject, placement = stored_subject(stored, torch.bfloat16), AcrossRanks(mesh)
        total = sum(each.nbytes for each in subject.model.parameters())
        largest = max(sum(each.nbytes for each in block.parameters()) for block in subject.blocks)
        predicted = placement.predict(subject, CPU)
        assert placement.attach(subject, CPU).footprint == predicted
        mine = sum(local(each).nbytes for each in subject.model.parameters())
        assert mine == pytest.approx(total / ranks.world_size, rel=0.05)
        rest = total - sum(sum(each.nbytes for each in block.parameters()) for block in subject.blocks)
        buffers = sum(each.nbytes for each in subject.model.buffers())
        assert predicted.device == pytest.approx(mine + 2 * largest + rest + buffers, rel=0.02)
        generator = torch.Generator().manual_seed(ranks.rank)  # each rank asks something else
        noisy, text = torch.randn(1, 8, 1, 8, 8, generator=generator), torch.randn(1, 4, 32, generator=generator)
        question = noisy.bfloat16(), torch.tensor([300.0]), text.bfloat16()
        with torch.no_grad():
            expected = load_model(stored, dtype=torch.bfloat16)(*question, return_dict=False)[0]
            for _ in range(2):
                assert torch.equal(subject.model(*question, return_dict=False)[0], expected)
        assert all(isinstance(each, DTensor) for each in subject.model.parameters()), "nothing stays whole"


def test_a_frozen_model_in_slices_takes_what_was_predicted_and_says_the_same(tiny_folder, tmp_path):
    run_ranks(4, slices, tiny_folder / "transformer", folder=tmp_path)


def traffic(folder):
    with joined(CPU, needs_group=True) as ranks:
        name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
        calls, reduce = [], getattr(dist, name)
        setattr(dist, name, lambda *args, **kwargs: calls.append(1) or reduce(*args, **kwargs))
        toy(None, ranks, steps=2, accumulation=3).run()
        assert len(calls) == 2 * 2, "one for the block and one for the rest, in each step"


def traffic_of_the_whole(folder):
    calls, wrap = [], loop_module.DistributedDataParallel

    class Counted(wrap):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.register_comm_hook(None, lambda state, bucket: calls.append(1) or allreduce_hook(state, bucket))

    with joined(CPU, needs_group=True) as ranks, pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_module, "DistributedDataParallel", Counted)
        make_loop(steps=2, accumulation=3, ranks=ranks).run()
        assert len(calls) == 2, "one in each step"


@pytest.mark.parametrize("how", [traffic, traffic_of_the_whole], ids=["slices", "whole"])
def test_gradients_travel_with_the_last_batch_of_a_step_alone(tmp_path, how):
    run_ranks(2, how, tmp_path, folder=tmp_path)


def resume(folder, steps, how):
    with joined(CPU, needs_group=True) as ranks:
        if how == "slices":
            toy(folder, ranks, steps).run()
        else:
            loop = make_loop(folder, steps=steps, method=method_of(ranks.rank), ranks=ranks, log_every=7, resume=True)
            loop.run()


def test_whole_and_slices_have_the_same_state(tmp_path):
    """Each goes on from the other's, and a state is the same whoever wrote it: names, shapes, values."""
    for name, first, second in (("a", "slices", "whole"), ("b", "whole", "slices")):
        run_ranks(2, resume, tmp_path / name, 3, first, folder=tmp_path)
        run_ranks(2, resume, tmp_path / name, 6, second, folder=tmp_path)
    ours, others = (load_state(TrainingStates(tmp_path / name, 1).newest()).tensors for name in ("a", "b"))
    assert ours.keys() == others.keys()
    for name, value in others.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)


def resume_from_a_folder_that_lags(folder):
    with joined(CPU, needs_group=True) as ranks:
        states = TrainingStates(folder, 9)
        if ranks.rank == 1:
            states.newest = lambda: folder / "step-00000002"
        loop = make_loop(steps=6, method=ToyMethod(dropout=0.2), ranks=ranks)
        resume_run("auto", loop, states)
        assert ranks.gather(loop.step) == [4, 4]


def test_all_ranks_go_on_from_the_state_that_the_first_finds(tmp_path):
    """A folder that machines share may look older from one of them."""
    make_loop(tmp_path / "states", steps=4, method=ToyMethod(dropout=0.2), save_every=2).run()
    run_ranks(2, resume_from_a_folder_that_lags, tmp_path / "states", folder=tmp_path)


def spoil(folder):
    with joined(CPU, needs_group=True) as ranks:
        loop = make_loop(steps=4, ranks=ranks, reader=ToyReader(10, bad=2), log_every=4)
        with pytest.raises(TrainingError, match=r"The loss of role 'student' is nan at step \d, on .*sample-2\b"):
            loop.run()


def test_all_ranks_blame_the_sample_of_one(tmp_path):
    """The others have seen nothing but gradients that are not finite."""
    run_ranks(2, spoil, tmp_path, folder=tmp_path)
