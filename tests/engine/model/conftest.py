"""What several tests of models share and only need once."""

from pathlib import Path
from typing import Any

import pytest

from engine.model.checkpoint import load_checkpoint
from engine.model.tokenizer import Tokenizer
from tests.engine.model.vocabularies import theirs


@pytest.fixture(scope="session")
def default_tokenizers(model_path: Path) -> tuple[Tokenizer, Any]:
    """The default model's tokenizer: ours, and that of transformers (which takes seconds to read the file)."""
    return load_checkpoint(model_path).tokenizer, theirs(model_path.parent, gguf_file=model_path.name)
