"""What `model` and `optim` compute, by Triton on a GPU; loaded only there."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.kernels.adamw import OnePassAdamW as OnePassAdamW
    from drumline.kernels.cross_entropy import cross_entropy_in_place as cross_entropy_in_place
    from drumline.kernels.cuda_graphs import WARM_UPS as WARM_UPS
    from drumline.kernels.cuda_graphs import Recorded as Recorded
    from drumline.kernels.cuda_graphs import with_graphs as with_graphs
    from drumline.kernels.gpt import FUSED as FUSED
    from drumline.kernels.gpt import FusedGPT as FusedGPT
    from drumline.kernels.gpt import check_fp8 as check_fp8
    from drumline.kernels.gpt import fits as fits
    from drumline.kernels.gpt import has_kernels as has_kernels
    from drumline.kernels.gpt import with_kernels as with_kernels
    from drumline.kernels.muon import muon_apply as muon_apply
    from drumline.kernels.muon import muon_look_ahead as muon_look_ahead

__getattr__, __dir__, __all__ = public(__name__, __file__)
