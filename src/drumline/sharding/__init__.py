"""Models larger than one GPU -> parts on ranks.

mesh: which ranks share a replica. wrapping: what of a model is gathered together, by torch's FSDP2. collectives: how
weights are gathered and gradients summed. strategy: the gradient of a step. making: weights without a whole model.
weights: facts about weights that are spread. step: a step of all that; of_scripts: with a
script's own model and optimizer. writing: forwards outside of a step.
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.sharding.making import undrawn
    from drumline.sharding.mesh import check_shard, may_lose_hosts, size_of_groups
    from drumline.sharding.of_scripts import script_step
    from drumline.sharding.step import check_sharding, dealt, kernels_in_use, sharded_step
    from drumline.sharding.weights import sums_of_all
    from drumline.sharding.wrapping import repeated_blocks, shard
    from drumline.sharding.writing import inside, is_sharded

__getattr__, __dir__, __all__ = public(__name__, __file__)
