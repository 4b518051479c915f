"""Weights that are restored are not initialized first."""

from functools import partial

import torch

from drumline.config.model import GPTConfig
from drumline.model.deferred import uninitialized
from drumline.model.gpt import GPT

SMALL = GPTConfig(vocab_size=97, max_position_embeddings=16, n_layers=2, n_heads=2, d_model=32, d_ff=64)
MODERN = GPTConfig(**{**SMALL.__dict__, "positions": "rope", "norm": "rmsnorm", "smear": True, "value_tables": 1})


def seeded(config: GPTConfig) -> GPT:
    torch.manual_seed(7)
    return GPT(config)


def test_a_model_that_will_be_restored_draws_no_random_number() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    model, _ = uninitialized(lambda: GPT(MODERN), torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(model, GPT) and model.rope is not None
    rope = seeded(MODERN).rope
    assert rope is not None and torch.equal(model.rope, rope)
    assert torch.equal(model.state_dict()["final_norm.weight"], torch.ones(32))


def test_initialized_after_all_it_has_the_same_bits_as_if_at_once() -> None:
    for config in (SMALL, MODERN):
        model, initialize = uninitialized(partial(seeded, config), torch.device("cpu"))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        initialize()
        wanted = seeded(config).state_dict()
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


def test_on_another_device_the_weights_are_there_and_rotary_angles_are_the_cpus() -> None:
    model, _ = uninitialized(lambda: GPT(MODERN), torch.device("meta"))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert isinstance(model, GPT) and model.rope is not None and model.rope.device.type == "cpu"
