"""Which prompt groups, and which of their responses, are trained on."""

from typing import Literal

from relax_hpc.algorithms.part import Part


class AsSampled(Part):
    """A batch is what was sampled; groups without spread teach nothing and are left out."""

    name: Literal["as_sampled"] = "as_sampled"
