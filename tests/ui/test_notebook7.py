"""The widgets in Notebook 7: the tests of JupyterLab that another application could fail."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.ui import test_lab
from tests.ui.lab import Notebook, notebook_in

pytestmark = [pytest.mark.ui, pytest.mark.slow, pytest.mark.long]
nothing_wrong = test_lab.nothing_wrong


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Iterator[Notebook]:
    with notebook_in("notebook", tmp_path_factory.mktemp("notebook"), browser) as book:
        yield book


test_a_view_shows_and_follows_a_run_whose_cell_returns = test_lab.test_a_view_shows_and_follows_a_run_whose_cell_returns
test_a_click_in_the_canvas_comes_back_to_python = test_lab.test_a_click_in_the_canvas_comes_back_to_python
test_the_step_slider_moves_the_figures = test_lab.test_the_step_slider_moves_the_figures
test_the_explorer_has_all_pages_in_tabs = test_lab.test_the_explorer_has_all_pages_in_tabs
