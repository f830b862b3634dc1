"""linear_log_probs: the same draws as for the loss, and an upstream gradient for each result."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tests.fuzz.calls import check, draw_workspace, with_enough_workspace
from tests.fuzz.compare import SUMS, References, mapped, widened
from tests.fuzz.draw import Draw
from tests.fuzz.loss import draw_backend, truths_rounding
from tests.fuzz.loss_inputs import make_inputs, sizes
from tests.fuzz.ways import pick_way
from tests.support.budgets import dense_log_probs, differentiate_log_probs, log_prob_magnitudes
from tests.support.loss import check_argmax, fused_log_probs, references_log_probs

NAMES = ("log_prob", "entropy", "logsumexp", "argmax")


def case(draw: Draw) -> Callable[[], None]:
    dtype = draw.dtype()
    options = {"softcap": draw.pick("softcap", (None, None, 0.5, 30.0))}
    options["ignore_index"] = draw.pick("ignore_index", (-100, 0))
    inputs = make_inputs(draw, *sizes(draw), dtype, ignore_index=options["ignore_index"], loss=False)
    if inputs.logit_scale is None:
        options["logit_scale"] = draw.pick("logit_scale", (None, None, 0.3, -2.0))
    small = inputs.linear_weight.numel() < 5000 and inputs.input.numel() < 2000
    backend, workspace, way = draw_backend(draw, dtype, small=small), draw_workspace(draw), pick_way(draw)
    used = [draw.chance(0.6) for _ in range(3)]
    used[draw.randrange(3)] = True
    draw.note(used=used)
    seeds = [draw.normal(inputs.leading, inputs.sum_dtype) if each else None for each in used]
    leaves = inputs.leaves()
    dtypes = dict.fromkeys(NAMES, inputs.sum_dtype) | {name: leaf.dtype for name, leaf in leaves.items()}
    dtypes["argmax"] = torch.int64

    def run() -> None:
        exact, eager, magnitude = references_log_probs(inputs, seeds, **options)
        refs = widened(
            References(exact, eager, magnitude | {"argmax": exact["argmax"]}),
            lambda convert: differentiate_log_probs(
                dense_log_probs, mapped(inputs, convert), seeds, **options
            ),
        )

        def moved_entropy(rounding: float) -> dict[str, Tensor]:
            """Magnitudes of gradients, of which `rounding` also bounds what the entropy's moves by.

            Backward computes the logits once more. In p (ln p + H) their rounding does not cancel,
            even where the exact gradient is 0 because p is 1.
            """
            if seeds[1] is None:
                return {}
            of_p = log_prob_magnitudes(inputs.to(torch.float64), (None, None, seeds[1].double()), **options)
            return {
                name: refs.magnitude[name]
                + of_p[name].double() * min(1.0, rounding / torch.finfo(leaf.dtype).eps)
                for name, leaf in leaves.items()
            }

        # The entropy has the logarithm of a sum of exponentials, which is 1 or more. Where it is
        # nearly 1, nothing of the entropy is as large as one rounding of that sum.
        refs.magnitude["entropy"] = refs.magnitude["entropy"] + 1 / SUMS

        def within(workspace: int | None) -> None:
            def function(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
                own = replace(inputs, **leaves)
                found = fused_log_probs(own, workspace=workspace, backend=backend, **options)
                return dict(zip(NAMES, found))

            own = truths_rounding(inputs, **options)
            check(
                function,
                leaves,
                dict(zip(NAMES, seeds)),
                way,
                refs._replace(magnitude=refs.magnitude | moved_entropy(own)),
                dtypes,
                inputs.sum_dtype,
                rounding=own,
            )
            if way == "grad" and all(each.isfinite().all() for each in exact.values()):
                check_argmax(function(leaves)["argmax"], exact["argmax"], inputs, **options)

        with_enough_workspace(within, workspace)

    return run
