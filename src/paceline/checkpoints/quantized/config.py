"""What the small files of a folder say of how it was quantized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import LoadError, WeightsError
from paceline.files import read_json

KEYS = ("quantization_config", "compression_config", "quantization")
OWN = "paceline_quantization"
BLOCK = (128, 128)  # of 8-bit floats, where nothing is said
_NAMES = {"awq": "AWQ", "gptq": "GPTQ", "fp8": "fp8", "fbgemm_fp8": "FBGEMM", "auto-round": "auto-round",
          "intel/auto-round": "auto-round", "modelopt": "ModelOpt", "bitsandbytes": "bitsandbytes",
          "compressed-tensors": "compressed-tensors"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Said:
    """The quantization_config of a folder, and who made what."""

    raw: Mapping[str, Any]
    own: bool = False  # whether paceline quantized it
    maker: str = ""

    @classmethod
    def of(cls, folder: Path) -> Said:
        """Raises WeightsError for a config that cannot be read."""
        try:
            config = read_json(folder / "config.json") or {}
        except LoadError as error:
            raise WeightsError(str(error)) from error
        nested = config.get("text_config")
        places = (config, nested) if isinstance(nested, Mapping) else (config,)
        configs = [place[key] for place in places for key in KEYS if isinstance(place.get(key), Mapping)]
        return cls(configs[0] if configs else {}, OWN in config)

    def made_by(self, maker: str) -> Said:
        """With the maker that the config names, or else the one that is known by the layout."""
        return replace(self, maker=_NAMES.get(str(self.get("quant_method", "")).lower(), maker))

    def get(self, key: str, default: Any = None) -> Any:
        value = self.raw.get(key, default)
        return default if value is None else value

    @property
    def _weights(self) -> Mapping[str, Any]:
        """Of compressed-tensors: the numbers of the first group."""
        groups = self.get("config_groups", {})
        for group in groups.values() if isinstance(groups, Mapping) else ():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if isinstance(weights, Mapping):
                return weights
        return {}

    @property
    def bits(self) -> int:
        """Of a value; 4 where nothing is said."""
        bits = self.get("bits", self._weights.get("num_bits", 4))
        return bits if isinstance(bits, int) and 1 <= bits <= 8 else 4

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block of 8-bit floats."""
        shape = self.get("weight_block_size", self._weights.get("block_structure"))
        good = (
            isinstance(shape, list)
            and len(shape) == 2
            and all(isinstance(n, int) and 0 < n <= 1 << 16 for n in shape)
        )
        return (int(shape[0]), int(shape[1])) if good else BLOCK
