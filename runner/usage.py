"""What `--help` prints, read from the packaged configuration at once: Hydra takes half a second for it."""

from __future__ import annotations

import yaml

from runner import CONF


def usage() -> str:
    """Fill the help template of `config.yaml` with the groups that stand beside it."""
    settings = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))["hydra"]["help"]
    options = (
        (folder.name, sorted(path.stem for path in folder.glob("*.yaml")))
        for folder in sorted(CONF.iterdir())
        if folder.is_dir() and folder.name != "hydra"
    )
    groups = "\n".join(f"{group}: {', '.join(names)}" for group, names in options if names)
    text: str = settings["template"]
    text = text.replace("$APP_CONFIG_GROUPS", groups)
    for part in ("header", "footer"):
        text = text.replace(f"${{hydra.help.{part}}}", settings[part])
    return text
