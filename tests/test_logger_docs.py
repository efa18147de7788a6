"""Check that the logger written out in docs/logs.md works as it stands there."""

import re
from pathlib import Path

from runner.api import ValLoss
from tests.test_logger_console import step
from tests.test_logger_llmc import run_info

PAGE = (Path(__file__).parent.parent / "docs" / "logs.md").read_text()


def test_the_worked_example_runs(tmp_path):
    code = re.search(r"```python\n(.*?)```", PAGE, re.S)[1]
    assert len(code.splitlines()) <= 20
    names = {}
    exec(code, names)
    logger = names["CsvLogger"](metric="val/loss")
    logger.open(run_info(tmp_path))
    for event in (step(0), ValLoss(1, 3.5), ValLoss(2, 3.25)):
        logger.log(event)
    logger.close("finished")
    assert (tmp_path / "val-loss.csv").read_text() == "1,3.5\n2,3.25\n"


def test_every_logger_is_documented():
    plugins = Path(__file__).parent.parent / "plugins" / "logger"
    for module in plugins.glob("[a-z]*.py"):
        assert f"`{module.stem}`" in PAGE
