"""What Ollama's API says of models: /api/tags, /api/ps and /api/show."""

from __future__ import annotations

import hashlib
from typing import Any

from paceline.server.service import Service


def model_card(service: Service, name: str) -> dict[str, Any]:
    """Fields of /api/tags and /api/ps. The digest is one of the name: this server has no manifests."""
    about = service.loaded.about if service.loaded is not None else {}
    digest = hashlib.sha256(f"{name} {about.get('bytes', 0)}".encode()).hexdigest()
    return {
        "name": name,
        "model": name,
        "size": about.get("bytes", 0),
        "digest": digest,
        "details": _details(service),
    }


def model_about(service: Service) -> dict[str, Any]:
    """The answer of /api/show. Raises NotReady before the model is loaded."""
    room = service.room
    about = room.about
    family = str(about.get("family") or "unknown")
    can = ["completion", *(["tools"] if room.format.calls is not None else [])]
    can += ["thinking"] if room.format.thoughts is not None else []
    can += [{"image": "vision", "audio": "audio"}[kind] for kind in room.reads]
    suggested = "\n".join(f"{name} {value}" for name, value in room.sampling.items())
    return {
        "modelfile": "", "license": "", "parameters": suggested, "template": room.tokenizer.template or "",
        "details": _details(service), "capabilities": can,
        "model_info": {
            "general.architecture": family, "general.basename": service.model,
            f"{family}.context_length": room.max_len, f"{family}.vocab_size": room.vocab_size,
        },
    }  # fmt: skip


def _details(service: Service) -> dict[str, Any]:
    about = service.loaded.about if service.loaded is not None else {}
    family = str(about.get("family") or "unknown")
    return {
        "parent_model": "", "format": about.get("format", ""), "family": family, "families": [family],
        "parameter_size": about.get("parameters", ""), "quantization_level": about.get("dtype", ""),
    }  # fmt: skip
