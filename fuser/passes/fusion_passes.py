"""The ordered passes that run on a concretized fusion before it is sharded and segmented."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from fuser.ir.fusion import Fusion
from fuser.ir.verify import verify_fusion
from fuser.passes.consecutive_casts import consecutive_casts
from fuser.passes.look_up_first import look_up_first
from fuser.passes.masks_to_biases import masks_to_biases
from fuser.passes.remove_bcast_squeeze import remove_bcast_squeeze
from fuser.passes.remove_unused import remove_unused
from fuser.passes.separate_updates import separate_updates
from fuser.passes.view_first import view_first

PASSES: tuple[tuple[str, Callable[[Fusion], None]], ...] = (
    # Before uses are counted: it adds some.
    ("separate_updates", separate_updates),
    # Early, so that the others do not count uses that do not matter.
    ("remove_unused", remove_unused),
    ("remove_bcast_squeeze", remove_bcast_squeeze),
    # After the views are gone that stood between two casts.
    ("consecutive_casts", consecutive_casts),
    # After unused ops are gone, which would count as readers of a table.
    ("look_up_first", look_up_first),
    # After casts are gone that would stand between a reshape and an input.
    ("view_first", view_first),
)


def run_passes(fusion: Fusion, *, repeated: Collection[int] = ()) -> None:
    """Run all passes in place, verifying the fusion after each; `repeated` are the axes of inputs,
    by number, of which memory holds one element for this input class."""
    # First, so that the others see its kernels.
    masked = ("masks_to_biases", partial(masks_to_biases, repeated=repeated))
    for name, run in (masked, *PASSES):
        run(fusion)
        verify_fusion(fusion, after=name)
