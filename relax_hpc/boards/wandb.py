"""Weights & Biases."""

import html
from collections.abc import Mapping

from relax_hpc.boards.service import Described
from relax_hpc.telemetry.tensorboard import Text

_STEP = "step"
"""Horizontal axis of all curves; evaluations come late, which W&B's own count does not allow."""


class Wandb:
    """A run of W&B. Without an account or network it is written to `wandb/` in the run."""

    def __init__(self, run: Described) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume=None if run.offline else "allow",
            config=dict(run.settings),
            dir=str(run.folder),
            mode="offline" if run.offline else None,
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        self._run.log({_STEP: step, **values, "_timestamp": time})

    def say(self, text: Text) -> None:
        shown = self._wandb.Html(f"<pre>{html.escape(text.text)}</pre>", inject=False)
        self._run.log({_STEP: text.step, text.tag: shown})

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
        self._wandb.teardown()  # its process has written all by then

    def pause(self) -> None:
        self.finish(failed=False)
