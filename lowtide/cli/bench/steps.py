"""Implement `lowtide bench steps`: whole steps of fine-tuning."""

from typing import Annotated

from lowtide.cli.bench.ranks import FullySharded, check_ranks
from lowtide.cli.bench.tables import CaseTable, Names, Out, Smoke, choose, names_option, print_tables
from lowtide.cli.shared.parameters import DeviceOption
from lowtide.tools.bench.steps.cases import STEP_CASES, under_fsdp
from lowtide.tools.bench.steps.rows import FSDP_STEP_PROVIDERS, STEP_PROVIDERS, STEPS, step_rows
from lowtide.tools.environment import Device, choose_device
from lowtide.tools.errors import UserError
from lowtide.tools.ranks import from_first, joined

FSDP_STEP = "Llama-3.2-1B"


def steps(
    case: Annotated[Names, names_option("A model", f"all, with --fsdp {FSDP_STEP}")] = None,
    provider: Annotated[Names, names_option("A way to compute the loss")] = None,
    fsdp: FullySharded = None,
    device: DeviceOption = Device.auto,
    smoke: Smoke = False,
    out: Out = None,
) -> None:
    """Time whole steps of fine-tuning public models, with weights drawn at random.

    Each row is one way to compute the loss of the same model, in turn with the
    others: the step's median time, the ratio to the eager step, tokens a second,
    and the peak memory with parameters and optimizer. Layers are checkpointed.

    With --fsdp each layer is a unit of FSDP2, float32 and computed in bfloat16,
    and the head is not tied with the embedding. One row is of a model whose
    head lowtide.shard_head divides. Times are rank 0's, tokens those of all
    ranks, peaks the largest of any rank.
    """
    on = "cpu" if smoke else choose_device(device)
    with joined(on):

        def check() -> None:
            check_ranks("steps", fsdp=fsdp)
            if on == "cpu" and not smoke:
                raise UserError("needs a CUDA device; --smoke runs a small model on the CPU")

        from_first(check)
        if fsdp is not None and not smoke:
            case = case or [FSDP_STEP]
        chosen = choose([each for each in STEP_CASES if each.device == on], case, smoke, "--case")
        known = STEP_PROVIDERS if fsdp is None else FSDP_STEP_PROVIDERS
        providers = choose(known, provider, smoke, "--provider")
        if fsdp is not None:
            chosen = [under_fsdp(each) for each in chosen]
        tables = [CaseTable(each.name, len(providers), step_rows(each, providers)) for each in chosen]
        print_tables(tables, on, smoke, out, STEPS)
