"""What all test files share: their order, and a real web corpus with a small tokenizer and token stream of it."""

from pathlib import Path

import pytest
from writing import data_config

from tapernorm_lab.config.jobs import CorpusJob, TokenizerJob
from tapernorm_lab.config.sections import TokenizerConfig
from tapernorm_lab.data.corpus import build_corpus
from tapernorm_lab.data.sentencepiece import train_tokenizer

# Files that take longest, longest first: started last, one of them would run on alone beside an idle core.
LONGEST = [
    *("workflow/test_plans.py", "workflow/test_slurm.py", "workflow/test_workflow.py"),
    *("workflow/test_interruptions.py", "project/test_packaging.py", "tapernorm/test_smollm2.py"),
    "tapernorm_lab/experiments/test_pretrain.py",
]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """For `-m slow`, which few files have tests of: those that never name the marker are not imported."""
    if config.getoption("markexpr") == "slow" and collection_path.suffix == ".py":
        return "mark.slow" not in collection_path.read_text(encoding="utf-8") or None
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(LONGEST)))


@pytest.fixture(scope="session")
def web_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The World English Bible, one document in twenty held out (folder)."""
    out = tmp_path_factory.mktemp("web") / "corpus"
    build_corpus(CorpusJob(data=(data_config("web", valid_fraction=0.05),)), out)
    return out


@pytest.fixture(scope="session")
def web_tokenizer(web_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1024 BPE pieces trained on the whole training split of `web_corpus` (folder)."""
    out = tmp_path_factory.mktemp("web") / "tokenizer"
    settings = TokenizerConfig(vocab_size=1024, model_type="bpe", max_documents=None, literal_u2581="refuse")
    train_tokenizer(TokenizerJob(tokenizer=settings), web_corpus, out)
    return out


@pytest.fixture(scope="session")
def web_tokens(web_corpus: Path, web_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token streams of `web_corpus` under `web_tokenizer` (folder)."""
    from tapernorm_lab.data.token_stream import write_tokens

    out = tmp_path_factory.mktemp("web") / "tokens"
    write_tokens(web_corpus, web_tokenizer, out, context=128)
    return out
