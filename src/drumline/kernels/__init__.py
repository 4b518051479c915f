"""What `model` and `optim` compute, as Triton kernels for a GPU; loaded only there."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.kernels.adamw import OnePassAdamW
    from drumline.kernels.cross_entropy import cross_entropy_in_place
    from drumline.kernels.cuda_graphs import WARM_UPS, RecordedBackward, with_graphs
    from drumline.kernels.gpt import FUSED, FusedGPT, check_fp8, fastest_attention, fits, has_kernels, with_kernels
    from drumline.kernels.muon import muon_apply, muon_look_ahead, muon_normalise
    from drumline.kernels.sums import piece_sums
    from drumline.kernels.unread import update_unread

__getattr__, __dir__, __all__ = public(__name__, __file__)
