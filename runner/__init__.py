"""Pre-train GPT-style language models from one Hydra-configured command.

Map: `cli` composes and checks a configuration, `launch` claims the run folder and starts one process
per rank, `job` is one rank's life, `session` builds its parts, `train` is the loop. `api` holds every
value and protocol that the parts share: read it first.
"""

from pathlib import Path

__version__ = "0.1.0"

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parent

# In a checkout (or an editable install) `conf/` and `plugins/` stand beside the package; a wheel
# carries them inside it. Either way `runner.plugins` and CONF name the same things.
if (_CHECKOUT / "pyproject.toml").is_file() and (_CHECKOUT / "plugins" / "__init__.py").is_file():
    __path__.append(str(_CHECKOUT))

CONF = next(p for p in (_CHECKOUT / "conf", _PACKAGE / "conf") if (p / "config.yaml").is_file())
