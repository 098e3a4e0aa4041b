"""What a run leaves and takes up again: adapters, checkpoints, the last of them.

Knows: the run's folder, a Stepper's masters, an Optimizer's state, the process's Share. Does not know data,
losses or when to save. Parameters of a model in parts are put together first, so that files are those of one
process, whatever trained them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from mlxserve.errors import UsageError
from mlxserve.lora import adapters, checkpoint
from mlxserve.lora.checkpoint import State
from mlxserve.lora.config import RunConfig, to_dict, write_yaml
from mlxserve.lora.optim import Arrays, Optimizer, map_moments
from mlxserve.lora.share import Share
from mlxserve.lora.step import Stepper


class Saver:
    """Writes and reads a run's folder; run None writes nothing. All processes of a share call each method,
    and the one that writes does."""

    def __init__(
        self,
        run: Path | None,
        config: RunConfig,
        stepper: Stepper,
        optimizer: Optimizer,
        share: Share,
        base: str,
    ) -> None:
        self.run, self.config, self.base = run, config, base
        self.stepper, self.optimizer, self.share = stepper, optimizer, share
        self.saved_step = -1

    @property
    def _folder(self) -> Path | None:
        """The run's folder, in the process that writes it."""
        return self.run if self.share.writes else None

    def begin(self) -> None:
        """Tidy up after a killed run and write the settings."""
        if self._folder is not None:
            checkpoint.recover(self._folder)
            checkpoint.write_file(self._folder / "config.yaml", write_yaml(self.config))

    def adapter(self) -> adapters.Adapter:
        """What was trained, now."""
        if self.config.lora.type == "full":
            return adapters.Adapter("full", self._whole(), {}, self.base)
        found = adapters.of_model(self.stepper.model, base=self.base)
        found.arrays = self.share.whole(found.arrays)
        found.dropout = self.config.lora.dropout
        return found

    def _whole(self) -> Arrays:
        return self.share.whole(dict(self.stepper.masters))

    def _filler(self) -> Callable[[Path], None]:
        """What writes the adapter as it is now into a folder."""
        adapter = self.adapter()
        settings = {"lora": to_dict(self.config)["lora"], "quantize": self.config.quantize}
        return lambda folder: adapters.save(folder, adapter, settings)

    def save_adapter(self, name: str) -> Path | None:
        """Write the run's folder `name`; returns it where something was written."""
        fill = self._filler()
        if self._folder is None:
            return None
        checkpoint.write_folder(self._folder / name, fill)
        return self._folder / name

    def save_checkpoint(self, state: State) -> Path | None:
        """Write checkpoints/<step>, unless that was the last thing written."""
        if self.saved_step == state.step:
            return None
        fill, arrays = self._filler(), map_moments(self.optimizer.state(), self.share.whole)
        self.saved_step = state.step
        if self._folder is None:
            return None
        return checkpoint.save_checkpoint(self._folder, state, arrays, fill, self.config.save.keep)

    def save_state(self, state: State) -> None:
        """Bring the newest checkpoint's state up to date, where nothing was trained since."""
        if self._folder is not None and self.saved_step == state.step:
            checkpoint.rewrite_state(self._folder, state)

    def take_best(self) -> None:
        """Let the model have the best adapter again; without a folder it keeps the last."""
        self._install(adapters.read(self._folder / "best").arrays if self._folder is not None else None)

    def _install(self, arrays: Arrays | None) -> None:
        """Take over the whole model's parameters from the writing process; None there keeps what it has."""
        whole = self._whole()
        if not self.share.writes:
            arrays = {name: mx.zeros_like(value) for name, value in whole.items()}
        arrays = whole if arrays is None else arrays
        if arrays.keys() != whole.keys():
            raise UsageError("The checkpoint trains other parameters than this run.", param="resume")
        masters = self.share.part(self.share.spread(arrays))
        masters = {name: masters[name].astype(mx.float32) for name in self.stepper.masters}
        mx.eval(masters)
        self.stepper.install(masters)

    def resume(self, own: State, path: Path | None = None) -> tuple[State, Path | None]:
        """Take up the newest checkpoint, or `path`; returns where the run is, and what was read.

        Raises UsageError where there is none, or where it belongs to other data or settings than `own`.
        """
        arrays = map_moments(self.optimizer.state(), self.share.whole)
        if self.share.writes:
            path = path or self._newest()
            state, found = _matching(path, own)
            if found.keys() != arrays.keys():
                raise UsageError(f"{path} trains other parameters than this run.", param="resume")
            arrays = found | {"state": checkpoint.state_numbers(state)}
            self._install(adapters.read(path).arrays)
        else:
            arrays = {name: mx.zeros_like(value) for name, value in arrays.items()}
            arrays["state"] = mx.zeros_like(checkpoint.state_numbers(own))
            self._install(None)
        arrays = self.share.spread(arrays)
        state = checkpoint.state_of(arrays.pop("state"))
        self.optimizer.restore(map_moments(arrays, self.share.part))
        self.saved_step = state.step
        return state, path

    def _newest(self) -> Path:
        assert self.run is not None
        checkpoint.recover(self.run)
        found = checkpoint.checkpoints(self.run)
        if not found:
            raise UsageError(f"{self.run} holds no checkpoint to resume from.", param="resume")
        return found[-1]


def _matching(path: Path, own: State) -> tuple[State, Arrays]:
    """A checkpoint's state and optimiser, if it is of this run."""
    state, arrays = checkpoint.read_checkpoint(path)
    for name, words in (("data", "other rows"), ("settings", "other settings")):
        if getattr(state, name) != getattr(own, name):
            raise UsageError(f"{path} was written with {words}; resume with the run's own.", param="resume")
    return state, arrays
