"""Whether a model is here, without fetching it."""

from pathlib import Path

import pytest

from engine.model.find import find_model


def test_a_path_is_here_when_it_exists(tmp_path: Path) -> None:
    assert find_model(str(tmp_path)) == tmp_path
    for name in (str(tmp_path / "gone.gguf"), "", "no/such-model-anywhere", "not a name at all"):
        assert find_model(name) is None, name


def test_the_default_model_is_here_only_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path))
    assert find_model("smollm2-135m") is None
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF, but cut")
    assert find_model("smollm2-135m") is None


@pytest.mark.model
def test_the_default_model_is_found_where_it_was_fetched(model_path: Path) -> None:
    assert find_model("smollm2-135m") == model_path
