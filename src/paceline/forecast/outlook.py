"""Where `paceline info` looks: what is here, the hub, or the shape of a published model; and what to type next."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path

from paceline.checkpoints.loading import has_no_weights
from paceline.config import EngineConfig
from paceline.errors import ConfigError, LoadError, UsageError
from paceline.forecast.estimate import Fit, chosen
from paceline.forecast.published import published
from paceline.hub.names import CACHE_PREFIX, check_folder, parse_hub
from paceline.hub.outline import as_named, plan
from paceline.hub.resolve import Role, look_at
from paceline.models.config import read_config


class Outlook:
    """`say` gets a line where something was looked for in vain. `planned`: the weights are not there to be read."""

    def __init__(self, scratch: Path, say: Callable[[str], None]) -> None:
        self.say, self.planned = say, False
        self._scratch, self._folder = scratch, Path()
        self._looked_at: dict[str, Path] = {}

    def find(self, name: str) -> Path:
        """A folder with the config of the target `name`, as `look_at`, or of a published model's shape. Its headers are
        fetched once.
        """
        if name not in self._looked_at:
            self._looked_at[name] = self._find(name)
        return self._looked_at[name]

    def _find(self, name: str) -> Path:
        hub = parse_hub(name) if not Path(name).exists() else None
        known = published(name if hub is None else hub.id) if hub is None or hub.tag is None else None
        try:
            return check_folder(look_at(name, "target", self._scratch, True))
        except (UsageError, LoadError) as error:
            if known is None or isinstance(error, ConfigError) or Path(name).exists():
                raise
            hub_id, raw = known
            if isinstance(error, LoadError):
                self.say(f"{error}; what follows is of the shape that was published for {hub_id}")
        self.planned = True
        return plan(raw, self._place(hub_id))

    def look(self, name: str | Path, role: Role) -> Path:
        return look_at(name, role, self._scratch)

    def weighed(self, folder: Path) -> Path:
        """`folder`, or what it would be with weights in bfloat16 where only the config is there."""
        self._folder = folder
        if not has_no_weights(folder):
            return folder
        self.planned = True
        return plan(read_config(folder), self._scratch / "planned")

    def named(self, text: str) -> str:
        """`text` with the names that a user knows."""
        return as_named(text.replace(str(self._scratch / "planned"), str(self._folder)), self._scratch)

    def next(self, config: EngineConfig, folder: Path, fits: Seq[Fit], free: int) -> str:
        """What to type, or why nothing helps. `free`: bytes of memory."""
        best = chosen(fits, free)
        if best.context is None:
            need = f"{best.size.memory / 1e9:.1f} GB"
            return f"it does not fit: free {need} of memory and more, or choose a smaller model (`paceline list`)"
        quantize = "" if best is fits[0] else f" --quantize {best.kind}"
        if self._scratch in folder.parents:  # nothing of it is here yet
            name = self.named(str(folder))
            return f"paceline pull {name} && paceline run {name}{quantize}"
        if self.planned:
            return f"fetch the weights into {folder}, then: paceline run {config.target}{quantize}"
        return f"paceline run {config.target}{quantize}"

    def _place(self, hub_id: str) -> Path:
        return self._scratch / f"{CACHE_PREFIX}{hub_id.replace('/', '--')}" / "snapshots" / "published"
